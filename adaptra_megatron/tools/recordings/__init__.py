# SPDX-License-Identifier: Apache-2.0
"""Recordings of jobs, ours and others', read as steps that can be replayed."""
