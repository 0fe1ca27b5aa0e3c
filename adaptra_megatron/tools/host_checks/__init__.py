# SPDX-License-Identifier: Apache-2.0
"""Checks of a host for `adaptra doctor`. Each module examines one subject and returns findings; none prints or
raises."""
