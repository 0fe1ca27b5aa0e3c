# SPDX-License-Identifier: Apache-2.0
"""Which order of actions each stage runs: costs, memory, plans, and when another is worth it."""
