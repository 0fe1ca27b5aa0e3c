# SPDX-License-Identifier: Apache-2.0
"""Describe the ranks of a job, and let them find each other."""
