# SPDX-License-Identifier: Apache-2.0
"""Decide on plans, paths and routes from what the detector finds."""
