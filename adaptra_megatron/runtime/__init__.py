# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule on Megatron model chunks."""
