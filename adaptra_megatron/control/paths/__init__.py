# SPDX-License-Identifier: Apache-2.0
"""Which path each link takes while both work."""
