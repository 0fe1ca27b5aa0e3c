# SPDX-License-Identifier: Apache-2.0
"""Choose which data-parallel replicas' gradients make an update, where some come late (STAR, arXiv 2512.09685)."""
