# SPDX-License-Identifier: Apache-2.0
"""How the clocks of different hosts relate."""
