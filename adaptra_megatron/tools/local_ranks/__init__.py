# SPDX-License-Identifier: Apache-2.0
"""Jobs of several ranks on this host, for the self-test and the benchmark of the transports."""
