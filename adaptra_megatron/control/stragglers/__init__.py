# SPDX-License-Identifier: Apache-2.0
"""Replicas that come last to gradient synchronisation: what ranks report, what is found, and what a host does of it."""
