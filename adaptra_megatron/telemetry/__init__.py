# SPDX-License-Identifier: Apache-2.0
"""Traces and pictures of what ran."""
