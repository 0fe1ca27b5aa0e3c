# SPDX-License-Identifier: Apache-2.0
"""Choose the order of actions of each stage: costs, memory, plans, and when another is worth it."""
