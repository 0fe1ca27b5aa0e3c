# SPDX-License-Identifier: Apache-2.0
"""Keep what an iteration or a step changes, to repeat it, take it back or hand it over."""
