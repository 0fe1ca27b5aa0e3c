# SPDX-License-Identifier: Apache-2.0
"""The demo: a link turns slow while a small GPT trains."""
