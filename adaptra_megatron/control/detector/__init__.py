# SPDX-License-Identifier: Apache-2.0
"""Detect slow and failed links and stages in measurements of iterations. No torch, no clock."""
