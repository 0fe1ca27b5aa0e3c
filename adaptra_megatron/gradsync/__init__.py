# SPDX-License-Identifier: Apache-2.0
"""Sum gradients of replicas around stragglers, and choose synchronisation modes."""

ALGORITHM_HELP = {
    "stragglar": "what can be summed up without the replica that came last before is, while the others wait for it",
    "hidden": "the same with another algorithm, for delays longer than an all-reduce",
}
"""Help of each row of `all_reduce_algorithms.ALGORITHMS` in --adaptra-gradient-sync. The table imports more."""
