# SPDX-License-Identifier: Apache-2.0
"""The transport of links that have two paths, and what joins the two into one link."""
