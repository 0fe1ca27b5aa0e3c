# SPDX-License-Identifier: Apache-2.0
"""Streams, events, clocks and copies to and from page-locked memory, for transports on GPUs."""
