# SPDX-License-Identifier: Apache-2.0
"""Analyse a recording in figures, in words and on a page."""
