# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a job on this machine, and compare trainings."""
