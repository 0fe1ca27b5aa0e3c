# SPDX-License-Identifier: Apache-2.0
"""Gradients of a stage: their two parts, their reduction over replicas, and their norm."""
