# SPDX-License-Identifier: Apache-2.0
"""Readers of recordings, ours and other tools', as steps that can be replayed."""
