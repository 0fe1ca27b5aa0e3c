# SPDX-License-Identifier: Apache-2.0
"""Run Megatron on CPUs."""
