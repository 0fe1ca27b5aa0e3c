# SPDX-License-Identifier: Apache-2.0
"""Choose the next action of a stage: by the plan, or by what has arrived."""
