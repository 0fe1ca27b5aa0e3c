# SPDX-License-Identifier: Apache-2.0
"""How training goes on when ranks die: process groups of those that live, commits, and meetings in a new epoch."""
