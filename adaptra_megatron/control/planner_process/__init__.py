# SPDX-License-Identifier: Apache-2.0
"""The sidecar process of a leading rank that looks at measurements and decides, so that no training process does."""
