# SPDX-License-Identifier: Apache-2.0
"""Which ranks a job has, and how they find each other."""
