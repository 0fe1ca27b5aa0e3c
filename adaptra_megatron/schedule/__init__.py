# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: no torch, no Megatron, no clock."""
