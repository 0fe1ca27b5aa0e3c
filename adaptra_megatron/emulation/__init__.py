# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a cluster: Megatron on CPU, emulated compute, slow links."""
