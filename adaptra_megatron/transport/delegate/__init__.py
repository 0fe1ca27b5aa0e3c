# SPDX-License-Identifier: Apache-2.0
"""The sidecar process of each rank that carries messages over hosts, and what starts, feeds and watches it."""
