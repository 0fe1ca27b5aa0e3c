# SPDX-License-Identifier: Apache-2.0
"""Which data-parallel replicas' gradients make an update, where some come late (STAR, arXiv 2512.09685)."""
