# SPDX-License-Identifier: Apache-2.0
"""What the processes beside a rank that work for the job's control have in common."""
