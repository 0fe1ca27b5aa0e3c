# SPDX-License-Identifier: Apache-2.0
"""Shared by all rooms: logs, processes, sealed messages between them, and the layout of the job."""
