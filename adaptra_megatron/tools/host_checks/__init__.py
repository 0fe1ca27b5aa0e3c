# SPDX-License-Identifier: Apache-2.0
"""Check a host for `adaptra doctor`. Each module looks at one thing and returns findings; none prints, none raises."""
