# SPDX-License-Identifier: Apache-2.0
"""What transports need of GPUs: streams, events, clocks, copies to and from page-locked memory."""
