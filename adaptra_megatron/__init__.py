# SPDX-License-Identifier: Apache-2.0
"""Adaptive pipeline schedules for Megatron-core.

Importing this package touches nothing and imports neither torch nor Megatron; `adaptra_megatron.patches`
is what changes Megatron, and only when a run asks for it.
"""

__version__ = "0.1.0"
