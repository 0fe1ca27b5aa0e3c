# SPDX-License-Identifier: Apache-2.0
"""The only room that imports Megatron: calls, gradients, state, refusals."""
