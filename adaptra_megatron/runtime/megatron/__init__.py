# SPDX-License-Identifier: Apache-2.0
"""The only modules that import Megatron: its call, its layers, its gradient synchronization."""
