# SPDX-License-Identifier: Apache-2.0
"""Transport over links with two paths, which are joined to one link."""
