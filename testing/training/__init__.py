# SPDX-License-Identifier: Apache-2.0
"""The small trainings that tests, campaigns and the demo run."""
