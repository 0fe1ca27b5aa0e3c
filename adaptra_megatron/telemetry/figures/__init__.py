# SPDX-License-Identifier: Apache-2.0
"""Figures of a running job: metrics, Prometheus, TensorBoard."""
