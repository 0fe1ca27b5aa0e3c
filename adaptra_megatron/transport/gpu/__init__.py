# SPDX-License-Identifier: Apache-2.0
"""Give transports what they need of GPUs: streams, events, clocks, copies to and from page-locked memory."""
