# SPDX-License-Identifier: Apache-2.0
"""All-reduces as data: the transfers of each round, their costs, and the choice between them."""

ALGORITHM_HELP = {
    "stragglar": "what can be summed up without the replica that came last before is, while the others wait for it",
    "hidden": "the same with another algorithm, for delays longer than an all-reduce",
}
"""Help of each row of `algorithms.ALGORITHMS` in --adaptra-gradient-sync, apart from the table, which imports more."""
