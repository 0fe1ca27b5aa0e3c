# SPDX-License-Identifier: Apache-2.0
"""Faults and delays, injected by decorators around real objects."""
