# SPDX-License-Identifier: Apache-2.0
"""Measure what transports of the host path carry on this machine."""
