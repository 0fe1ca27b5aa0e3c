# SPDX-License-Identifier: Apache-2.0
"""All-reduces as data: who sends what to whom in which round, what that costs, and which to choose."""
