# SPDX-License-Identifier: Apache-2.0
"""Detection of replicas that come last to gradient synchronisation, and the host's policy for them."""
