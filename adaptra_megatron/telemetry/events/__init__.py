# SPDX-License-Identifier: Apache-2.0
"""What happened in a run, as typed events in a log."""
