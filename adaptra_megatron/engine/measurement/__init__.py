# SPDX-License-Identifier: Apache-2.0
"""Measure the actions of iterations for plans, reports, traces and Megatron's timers."""
