# SPDX-License-Identifier: Apache-2.0
"""A connection between the training processes at both ends of a link, for control messages."""
