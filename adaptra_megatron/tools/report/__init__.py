# SPDX-License-Identifier: Apache-2.0
"""A run explained on one HTML page: findings are what is so, wording and charts show it, the page holds them."""
