# SPDX-License-Identifier: Apache-2.0
"""Training that continues when ranks fail: launcher, membership, generations, recovery."""
