# SPDX-License-Identifier: Apache-2.0
"""What people run beside a training: the `adaptra` command, reports, analysis, what-if."""
