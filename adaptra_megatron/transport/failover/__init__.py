# SPDX-License-Identifier: Apache-2.0
"""Protocol by which the ends of a link change paths without losing or duplicating a message."""
