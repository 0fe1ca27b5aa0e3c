# SPDX-License-Identifier: Apache-2.0
"""The delegate: each rank's sidecar process for the host path, with its control messages and its supervisor."""
