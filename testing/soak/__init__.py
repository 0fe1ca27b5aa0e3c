# SPDX-License-Identifier: Apache-2.0
"""The part of a fault campaign (campaigns/soak.py) that runs beside and inside the ranks."""
