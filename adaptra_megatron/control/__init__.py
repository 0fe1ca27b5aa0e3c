# SPDX-License-Identifier: Apache-2.0
"""What is measured is judged here, and plans, paths and routes are decided."""
