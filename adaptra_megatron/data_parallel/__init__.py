# SPDX-License-Identifier: Apache-2.0
"""Synchronisation of gradients between data-parallel replicas that uses the time for which one is late."""
