# SPDX-License-Identifier: Apache-2.0
"""Timelines of recorded runs."""
