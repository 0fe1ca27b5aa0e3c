# SPDX-License-Identifier: Apache-2.0
"""Move activations and gradients between stages."""
