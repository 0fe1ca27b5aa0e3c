# SPDX-License-Identifier: Apache-2.0
"""A rank that trains with Megatron's timers of single actions, where waiting for the whole device would hang."""

from __future__ import annotations

import sys

from testing.megatron.megatron_on_cpu import install


def main(argv: list[str]) -> None:
    install(with_fused_weight_gradient=True)
    import torch
    from adaptra_megatron.patches import enable
    from megatron.core.timers import Timers

    from adaptra_megatron.config import AdaptraConfig
    from testing.training.process_groups import join_job, leave_job, set_up_groups
    from testing.training.train import Trainer
    from testing.training.training_arguments import check_arguments, parse_arguments

    args = parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *argv])
    check_arguments(args, join_job(args))
    set_up_groups(args)
    applied = enable(AdaptraConfig(plan_csv=args.adaptra_plan_csv))
    runtime = applied.runtime
    assert runtime is not None
    waits = {"device": 0, "stream": 0}

    class Stream:
        def synchronize(self) -> None:
            waits["stream"] += 1

    def synchronize(device: object = None) -> None:
        assert not runtime.runs_actions, "waits for receives that end only when this rank goes on"
        waits["device"] += 1

    trainer = Trainer(args, (), runtime)
    trainer.config.timers = timers = Timers(2, "max")
    stream = Stream()
    torch.cuda.synchronize, torch.cuda.current_stream = synchronize, lambda device=None: stream
    trainer.run()
    first = torch.distributed.get_rank() == 0
    names = {"forward-backward", "forward-compute", "backward-compute", "backward-recv" if first else "forward-recv"}
    elapsed_s = {name: timers(name).elapsed(reset=False) for name in names}
    assert names <= set(timers._timers)
    assert min(elapsed_s.values()) > 0, elapsed_s
    assert elapsed_s["forward-compute"] + elapsed_s["backward-compute"] < elapsed_s["forward-backward"]
    actions = args.train_iters * args.num_micro_batches
    assert waits["stream"] == 2 * 2 * actions, "around each forward and each backward"
    assert waits["device"] > 0
    assert runtime.weight_gradients.computed > 0
    applied.undo()
    leave_job()


if __name__ == "__main__":
    main(sys.argv[1:])
