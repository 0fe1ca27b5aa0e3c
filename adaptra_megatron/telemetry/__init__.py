# SPDX-License-Identifier: Apache-2.0
"""Recording of a run: traces, events, figures."""
