# SPDX-License-Identifier: Apache-2.0
"""What transports of the host path carry on this machine."""
