# SPDX-License-Identifier: Apache-2.0
"""Run sidecar processes of a rank, and connect ranks to them."""
