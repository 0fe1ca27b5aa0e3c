# SPDX-License-Identifier: Apache-2.0
"""Training that goes on when ranks fail: launcher, membership, generations, recovery."""
