# SPDX-License-Identifier: Apache-2.0
"""The one room that imports Megatron: calls, gradients, state, refusals."""
