# SPDX-License-Identifier: Apache-2.0
"""Provide the tools that people run on a training's records: the `adaptra` command, reports, analysis, what-if."""
