# SPDX-License-Identifier: Apache-2.0
"""The commands that simulate and plan, with their input and output."""
