# SPDX-License-Identifier: Apache-2.0
"""Connect the stages of a pipeline at the start, and choose network interfaces and devices for each pair."""
