# SPDX-License-Identifier: Apache-2.0
"""Measure around the actions of an iteration, and pass that on: plans, reports, traces, Megatron's timers."""
