# SPDX-License-Identifier: Apache-2.0
"""Relate the clocks of different hosts."""
