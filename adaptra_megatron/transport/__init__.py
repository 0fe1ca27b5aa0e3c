# SPDX-License-Identifier: Apache-2.0
"""Moves activations and gradients between stages."""
