# SPDX-License-Identifier: Apache-2.0
"""The control loop: measurements of all ranks become one decision per iteration."""
