# SPDX-License-Identifier: Apache-2.0
"""Small trainings for tests, campaigns and the demonstration."""
