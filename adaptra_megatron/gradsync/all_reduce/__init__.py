# SPDX-License-Identifier: Apache-2.0
"""All-reduces as data: the transfers of each round, their costs, and the choice between them."""

ALGORITHM_HELP = {
    "stragglar": "what can be summed up without the replica that came last before is, while the others wait for it",
    "hidden": "the same with another algorithm, for delays longer than an all-reduce",
}
"""What each row of `algorithms.ALGORITHMS` does, in the help of --adaptra-gradient-sync: for whom the table itself is
too much to import."""
