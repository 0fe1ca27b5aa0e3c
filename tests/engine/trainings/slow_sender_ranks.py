# SPDX-License-Identifier: Apache-2.0
"""One rank of a training in which the first hand-over to a rank takes long. Arguments: this rank, seconds, script."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from testing.megatron.megatron_on_cpu import install

install()  # before Megatron is imported

from adaptra_megatron.engine import rejoining  # noqa: E402
from adaptra_megatron.tools.local_ranks.launch_ranks import run_script  # noqa: E402
from testing.replacing import Replaced, Replacement  # noqa: E402


def main() -> None:
    target, seconds, send = int(sys.argv[1]), [float(sys.argv[2])], rejoining._send

    @functools.wraps(send)
    def slowly(sender: Any, training: Any, pipeline: Any, handing: rejoining.Handing) -> None:
        if handing.target == target and seconds:
            time.sleep(seconds.pop())
        send(sender, training, pipeline, handing)

    with Replaced([Replacement(rejoining, "_send", slowly, "a state that takes long to send is emulated")]):
        run_script(sys.argv[3:])


if __name__ == "__main__":
    main()
