# SPDX-License-Identifier: Apache-2.0
"""The only folder that imports Megatron: calls, gradients, state, refusals."""
