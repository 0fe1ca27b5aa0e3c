# SPDX-License-Identifier: Apache-2.0
"""The protocol by which the ends of a link change from one path to the other without losing or doubling a message."""
