# SPDX-License-Identifier: Apache-2.0
"""The form of megatron.training.arguments, 0.14 to 0.19: `parse_args` looks `add_megatron_arguments` up when called."""

from __future__ import annotations

import argparse
from collections.abc import Callable

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="network size")
    group.add_argument("--pipeline-model-parallel-size", type=int, default=2)
    group.add_argument("--train-iters", type=int, default=3)
    group.add_argument("--dump-state", default=None)
    return parser


def parse_args(
    extra_args_provider: AddArguments | None = None, ignore_unknown_args: bool = False
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
    parser = add_megatron_arguments(parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
