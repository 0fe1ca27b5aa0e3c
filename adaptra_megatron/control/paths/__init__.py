# SPDX-License-Identifier: Apache-2.0
"""Choose the path of each link while both work."""
