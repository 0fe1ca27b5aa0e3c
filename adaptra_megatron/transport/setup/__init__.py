# SPDX-License-Identifier: Apache-2.0
"""Let the stages of a pipeline meet at the start, and find which network interfaces and devices join each two."""
