# SPDX-License-Identifier: Apache-2.0
"""Megatron on CPUs."""
