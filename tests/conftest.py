# SPDX-License-Identifier: Apache-2.0
"""Settings every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Test machines are shared: a slow example says nothing about the code, so time limits are pytest-timeout's alone.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
