# SPDX-License-Identifier: Apache-2.0
"""Control connections between the training processes at both ends of each link."""
