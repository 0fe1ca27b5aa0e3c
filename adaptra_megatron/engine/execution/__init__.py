# SPDX-License-Identifier: Apache-2.0
"""Runs a stage's actions in order, and takes and sends their messages."""
