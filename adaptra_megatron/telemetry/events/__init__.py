# SPDX-License-Identifier: Apache-2.0
"""Log what happens in a run as typed events."""
