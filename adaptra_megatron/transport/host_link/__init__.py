# SPDX-License-Identifier: Apache-2.0
"""One end of a link over the host path: frames in shared-memory rings, retransmissions and arrivals."""
