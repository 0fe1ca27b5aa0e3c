# SPDX-License-Identifier: Apache-2.0
"""Faults of links, host paths and listeners, injected by decorators around real objects."""
