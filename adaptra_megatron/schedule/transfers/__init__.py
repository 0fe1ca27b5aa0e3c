# SPDX-License-Identifier: Apache-2.0
"""Derive what stages send each other: messages, the order of launches, stock's blocking calls, deadlocks."""
