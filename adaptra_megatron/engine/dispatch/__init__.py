# SPDX-License-Identifier: Apache-2.0
"""Choose the next action of a stage: from the plan, or by which messages have arrived."""
