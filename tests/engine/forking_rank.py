# SPDX-License-Identifier: Apache-2.0
"""A rank of a training whose script forks itself: `forking_rank.py TRAINING_ARGUMENTS...`.

Rank 0 does so after its second iteration: one child ends by sys.exit, another by an exception. Both end as Python
programs do, with all handlers and clean-up of this one; the log says once they have. Every rank reads data of two
forked workers from then on; those of each iteration end in it, while links and delegate are in use.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from testing.megatron.megatron_on_cpu import install

install(with_fused_weight_gradient=True)

import torch  # noqa: E402  (Megatron on the CPU must be installed first)
import torch.distributed as dist  # noqa: E402  (Megatron on the CPU must be installed first)

from testing.training.train import Trainer, train  # noqa: E402
from testing.training.training_arguments import parse_arguments  # noqa: E402

CHILD_S = 6
"""Torch's own teardown may wait for threads that a forked child does not have."""


def main(arguments: list[str]) -> None:
    step = Trainer._train_step

    def forking_step(self: Trainer, *given: Any) -> Any:
        result = step(self, *given)
        if self.iteration == 2 and dist.get_rank() == 0:
            for error in (SystemExit(0), ValueError("in a forked child")):
                if (child := os.fork()) == 0:
                    signal.alarm(CHILD_S)
                    raise error
                os.waitpid(child, 0)
                sys.stdout.write(f"a child ended that raised {type(error).__name__}\n")
        if self.iteration >= 2:
            loader = torch.utils.data.DataLoader(range(8), num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
            assert [int(each) for each in loader] == list(range(8))
            sys.stdout.write("forked workers gave their data\n")
        return result

    Trainer._train_step = forking_step  # type: ignore[method-assign]
    result = train(parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *arguments]))
    sys.stdout.write(f"trained {result.adaptra['training_iterations']} iterations\n")


if __name__ == "__main__":
    main(sys.argv[1:])
