# SPDX-License-Identifier: Apache-2.0
"""A rank of a training with a campaign of lm-resiliency's fault kit: `kit_ranks.py KIT TRAINING_ARGUMENTS...`.

KIT is the folder that the kit is installed in. From iteration DELAYED on, it delays each forward of rank 1's model.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from testing.megatron.megatron_on_cpu import install

DELAYED, DELAY_MS = 20, 60.0


def campaign(kit: Any) -> Any:
    """A delay of rank 1, for good."""
    target = {"surface": "compute", "rank": 1, "module_path": "decoder"}
    fault = {"id": "delay", "type": "delay", "target": target, "parameters": {"delay_ms": DELAY_MS}}
    incident = {"id": "slow", "trigger": {"at": [DELAYED]}, "lifetime": {"until": "campaign_end"}, "faults": [fault]}
    document = {"name": "delays", "seed": 1, "schema_version": kit.SCHEMA_VERSION, "incidents": [incident]}
    return kit.FaultCampaign.from_dict(document)


def main(folder: str, arguments: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    install(with_fused_weight_gradient=True)
    from testing.training import train as training
    from testing.training.process_groups import leave_job
    from testing.training.training_arguments import parse_arguments

    sys.path.append(folder)
    kit: Any = importlib.import_module("lm_resiliency.fault_injection")
    run = training.Trainer.run

    def run_with_faults(trainer: Any) -> None:
        session = kit.enable_fault_injection(trainer.model, trainer.optimizer, campaign=campaign(kit))
        with session:
            run(trainer)

    training.Trainer.run = run_with_faults  # type: ignore[method-assign]
    args = parse_arguments(arguments)
    args.distributed_backend = "gloo"
    training.train(args)
    leave_job()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
