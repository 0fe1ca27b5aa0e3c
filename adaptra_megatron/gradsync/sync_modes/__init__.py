# SPDX-License-Identifier: Apache-2.0
"""Choose which data-parallel replicas' gradients make an update when some are late (STAR, arXiv 2512.09685)."""
