# SPDX-License-Identifier: Apache-2.0
"""Derive the transfers between stages: messages, the order of launches, stock's blocking calls, deadlocks."""
