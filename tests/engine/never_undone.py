# SPDX-License-Identifier: Apache-2.0
"""A rank of `scripts/train_gpt.py` that ends as Megatron's own scripts do: it never takes the patches back."""

from __future__ import annotations

import runpy
import sys
from typing import Any
from unittest import mock

from testing.megatron.megatron_on_cpu import install

install()

from adaptra_megatron.patches import application  # noqa: E402

from adaptra_megatron import patches  # noqa: E402


def enable(*arguments: Any, **options: Any) -> mock.Mock:
    applied = application.enable(*arguments, **options)
    return mock.Mock(runtime=applied.runtime)


patches.enable = enable
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
