# SPDX-License-Identifier: Apache-2.0
"""Sum gradients of replicas around stragglers, and choose synchronisation modes."""
