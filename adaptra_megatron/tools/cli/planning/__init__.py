# SPDX-License-Identifier: Apache-2.0
"""The commands that simulate and plan, and what they read and print."""
