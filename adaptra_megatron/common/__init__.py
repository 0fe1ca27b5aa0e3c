# SPDX-License-Identifier: Apache-2.0
"""Share what every room uses: logs, processes, sealed messages between them, and the layout of the job."""
