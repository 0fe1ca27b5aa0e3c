# SPDX-License-Identifier: Apache-2.0
"""How the stages of a pipeline meet at the start, and which network interfaces and devices join each two."""
