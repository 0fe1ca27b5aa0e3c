# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a link turns slow while a small GPT trains."""
