# SPDX-License-Identifier: Apache-2.0
"""What is measured around the actions of an iteration, and who gets it: plans, reports, traces, Megatron's timers."""
