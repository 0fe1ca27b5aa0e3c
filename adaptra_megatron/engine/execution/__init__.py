# SPDX-License-Identifier: Apache-2.0
"""Run a stage's actions in order, and receive and send their messages."""
