# SPDX-License-Identifier: Apache-2.0
"""One rank of trainings whose experts' tokens go by a stand-in of DeepEP."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from support import stand_in_deep_ep

stand_in_deep_ep.install()  # before Megatron is imported

from testing.megatron.megatron_on_cpu import install  # noqa: E402

install(with_fused_weight_gradient=True)

from testing.jobs import variants  # noqa: E402

if __name__ == "__main__":
    variants._main(sys.argv[1:])
