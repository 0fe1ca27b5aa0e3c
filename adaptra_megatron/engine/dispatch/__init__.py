# SPDX-License-Identifier: Apache-2.0
"""Which action of a stage runs next: by the plan, or by what has arrived."""
