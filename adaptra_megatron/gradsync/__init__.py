# SPDX-License-Identifier: Apache-2.0
"""Gradients of replicas summed around stragglers, and synchronisation modes."""
