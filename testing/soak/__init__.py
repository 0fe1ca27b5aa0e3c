# SPDX-License-Identifier: Apache-2.0
"""The parts of a fault campaign (campaigns/soak.py) that run in the ranks and in processes next to them."""
