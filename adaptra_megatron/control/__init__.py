# SPDX-License-Identifier: Apache-2.0
"""Judge measurements, and decide on plans, paths and routes."""
