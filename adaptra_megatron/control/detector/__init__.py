# SPDX-License-Identifier: Apache-2.0
"""Which links and stages are healthy, slow or dead, told from what iterations measured. No torch, no clock."""
