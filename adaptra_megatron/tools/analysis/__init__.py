# SPDX-License-Identifier: Apache-2.0
"""What a recording says, in figures, in words and on a page."""
