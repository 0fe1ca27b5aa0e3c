# SPDX-License-Identifier: Apache-2.0
"""Gradients of a stage: input and weight gradients, their reduction over replicas, and their norm."""
