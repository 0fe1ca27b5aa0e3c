# SPDX-License-Identifier: Apache-2.0
"""Every case that was published about training over slow links, as data, and what each system takes in it here.

Modules: `cases` (the published figures), `simulated` (all cases, in seconds), `real` (chosen cases in real processes),
`report` (tables), `plots`. What is modelled, and what is not, is in docs/published.md.
"""
