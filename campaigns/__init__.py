# SPDX-License-Identifier: Apache-2.0
"""Long runs against the package that users do not install: faults, slow links, published cases."""
