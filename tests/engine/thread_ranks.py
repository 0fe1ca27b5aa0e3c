# SPDX-License-Identifier: Apache-2.0
"""A rank that trains with --adaptra: `thread_ranks.py TRAINING_ARGUMENTS...` writes the names of its threads, and how
deep in calls it sends.

Counted are threads that stand at the begin of each of the last six iterations, without those that other packages
started; and frames from the schedule's call to the transport's, both included.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from typing import Any

THREADS, FRAMES = "threads: ", "frames: "


def main(arguments: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    from testing.megatron.megatron_on_cpu import install

    install(with_fused_weight_gradient=True)
    from adaptra_megatron.patches import enable

    from adaptra_megatron.config import AdaptraConfig
    from adaptra_megatron.transport.dual_path.host_transport import HostTransport
    from testing.training.process_groups import join_job, leave_job, set_up_groups
    from testing.training.train import Trainer
    from testing.training.training_arguments import check_arguments, parse_arguments

    args = parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *arguments])
    check_arguments(args, join_job(args))
    set_up_groups(args)

    standing = list[set[threading.Thread]]()

    def count(iteration: int) -> None:
        standing.append(set(threading.enumerate()))
        if iteration == args.train_iters - 1:
            names = sorted(thread.name for thread in set.intersection(*standing[-6:]))
            sys.stdout.write(f"{THREADS}{' '.join(name for name in names if name.startswith('adaptra-'))}\n")

    post_send, frames = HostTransport.post_send, set[int]()

    def count_frames(self: HostTransport, *arguments: Any) -> None:
        names = [frame.name for frame in traceback.extract_stack()]
        frames.add(len(names) - names.index("forward_backward"))
        post_send(self, *arguments)

    HostTransport.post_send = count_frames  # type: ignore[method-assign]
    applied = enable(AdaptraConfig())
    Trainer(args, (count,), applied.runtime).run()
    sys.stdout.write(f"{FRAMES}{max(frames)}\n")
    applied.undo()
    leave_job()


if __name__ == "__main__":
    main(sys.argv[1:])
