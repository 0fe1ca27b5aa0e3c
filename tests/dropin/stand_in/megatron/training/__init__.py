# SPDX-License-Identifier: Apache-2.0
"""Stands in for Megatron-LM's `megatron.training` next to the installed megatron.core: what --adaptra hooks into."""
