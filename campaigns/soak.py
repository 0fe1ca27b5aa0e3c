# SPDX-License-Identifier: Apache-2.0
"""The fault campaign: real training while paths, delegates and ranks fail, compared bitwise with training in peace.

    python -m campaigns.soak [--rounds 3] [--seed 1] [--output build/soak]

Trains a small GPT on 4 stages, once with stock Megatron and nothing broken, then with --adaptra over each transport
while links change their path every few messages, device paths swallow messages or raise, delegates are killed and
stopped, ranks and the job's store are stopped, rings are corrupted, and unauthenticated peers connect; then once more
with the store killed. Exit status: 0 if everything held, 1 if not, 2 for a wrong command line, 130 after Ctrl-C (which
ends the ranks).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError
from campaigns.soak_driver import SoakDriver
from campaigns.soak_processes import leftovers
from campaigns.soak_report import TrainingRecord, percentile, read_ranks, table
from testing.jobs.fork_server import ForkServer, ForkServerError
from testing.jobs.job_store import JobStore
from testing.jobs.variants import Variant, VariantReport, run_variants
from testing.soak.soak_plan import (
    PLAN_FILE,
    Campaign,
    Fault,
    Kind,
    iterations,
    make_plan,
    write_plan,
)

STAGES = 4
MICRO_BATCHES = 6
STOCK = "stock"
_ORDER_FILE = "order.csv"
_MODEL = (
    f"--mock-data --no-gradient-accumulation-fusion --pipeline-model-parallel-size {STAGES} --num-layers {STAGES} "
    f"--hidden-size 32 --seq-length 32 --global-batch-size {MICRO_BATCHES} --log-interval 50"
)
_PER_ITERATION_S = 0.5
_PER_FAULT_S = 4.0
_START_S = 60.0


@dataclass
class SoakReport:
    """What one round showed."""

    records: list[TrainingRecord]
    switches: int = 0
    """Switches of directed links from one path to the other."""
    by_device: int = 0
    by_host: int = 0
    doubles: int = 0
    """Messages that came twice and were dropped."""
    elements_compared: int = 0
    problems: list[str] = field(default_factory=list)
    """Empty if everything held."""
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """For a file."""
        pauses = [recovery for record in self.records for recovery in record.recoveries()]
        return {
            "faults": {kind.value: sum(record.strikes()[kind] for record in self.records) for kind in Kind},
            "recovery_s": {
                fraction: percentile([recovery.pause_s for recovery in pauses], float(fraction))
                for fraction in ("0.5", "0.99", "1.0")
            },
            "recoveries": [asdict(recovery) for recovery in pauses],
            "path_switches": self.switches,
            "messages": {"device": self.by_device, "host": self.by_host, "doubles_dropped": self.doubles},
            "elements_compared": self.elements_compared,
            "problems": self.problems,
            "seconds": self.seconds,
        }


def run_round(
    campaign: Campaign, number: int, directory: Path, server: ForkServer, say: Callable[[str], None]
) -> SoakReport:
    """One round: a reference, and a training under faults for each transport.

    Raises LaunchError, with the end of all logs and the stacks of ranks that hang, if a rank fails or time runs out.
    """
    started_s = time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    plans: dict[str, tuple[Fault, ...]] = {}
    for index, name in enumerate(campaign.trainings(number)):
        seed = f"{campaign.seed}:{number}:{name}"
        plans[name] = make_plan(seed, STAGES, campaign.counts(index), campaign.spacing, campaign.long_stop_s)
        (directory / name).mkdir(parents=True)
        write_plan(directory / name / PLAN_FILE, plans[name])
    length = max(iterations(plan) for plan in plans.values())
    faults = sum(len(plan) for plan in plans.values())
    timeout_s = _START_S + _PER_ITERATION_S * length * (1 + len(plans)) + _PER_FAULT_S * faults
    timeout_s += campaign.long_stops * campaign.long_stop_s
    say(f"round {number}: {faults} faults of paths and processes, {length} iterations per training")

    def progress(line: str) -> None:
        if line.startswith(" iteration"):
            done = sum(len(driver.done) for driver in drivers.values())
            say(f"{time.monotonic() - started_s:5.0f} s, {done:3d} processes struck |{line}")

    over = threading.Event()
    store = JobStore(server, directory / "store.log")
    drivers = {
        name: SoakDriver(directory / name, plan, STAGES, length, store.process_id, over.is_set)
        for name, plan in plans.items()
    }
    threads = [threading.Thread(target=driver.run, name=f"soak-{name}") for name, driver in drivers.items()]
    for thread in threads:
        thread.start()
    try:
        reports = run_variants(
            STAGES,
            _variants(campaign, number, directory, length),
            timeout_s=timeout_s,
            server=server,
            directory=directory / "ranks",
            env=store.environment,
            echo=progress,
        )
    finally:
        over.set()
        store.close()
        for thread in threads:
            thread.join()
    report = _judge(campaign, plans, drivers, reports, directory, length)
    report.seconds = time.monotonic() - started_s
    return report


def _variants(campaign: Campaign, number: int, directory: Path, length: int) -> list[Variant]:
    model = (*_MODEL.split(), "--train-iters", str(length))
    variants = [Variant(STOCK, model)]
    for name, transport in campaign.trainings(number).items():
        given = {
            "--adaptra-host-transport": transport,
            "--adaptra-timeout-s": f"{30 + campaign.long_stop_s:g}",
            "--emulate-path-flaps": f"{campaign.seed}:{number}:{name}",
            "--emulate-fault-plan": str((directory / name).resolve()),
        }
        if name != transport:  # without a store there are no decisions, and no plan but a given one
            given["--adaptra-plan-csv"] = str((directory / _ORDER_FILE).resolve())
        flags = tuple(part for pair in given.items() for part in pair)
        variants.append(Variant(name, (*model, "--adaptra", *flags), like=STOCK))
    (directory / _ORDER_FILE).write_text(schedule_to_csv(one_f_one_b(STAGES, MICRO_BATCHES)))
    return variants


def _judge(
    campaign: Campaign,
    plans: dict[str, tuple[Fault, ...]],
    drivers: dict[str, SoakDriver],
    reports: Sequence[VariantReport],
    directory: Path,
    length: int,
) -> SoakReport:
    result = SoakReport([])
    for report in reports[1:]:
        driver = drivers[report.name]
        ranks = read_ranks(directory / report.name, STAGES)
        record = TrainingRecord(report.name, plans[report.name], driver.done, ranks, list(driver.problems))
        record.check(2 * (STAGES - 1) * MICRO_BATCHES * length, campaign.longest_recovery_s)
        if not report.elements_compared:
            record.problems.append("nothing was compared with stock")
        record.problems += [f"not stock's numbers: {line}" for line in report.differences]
        footprint = driver.footprint
        sessions = {*footprint.ranks, *footprint.delegates}
        record.problems += leftovers(sessions, footprint.ports, footprint.names)
        result.records.append(record)
        result.problems += [f"{report.name}: {problem}" for problem in record.problems]
        result.elements_compared += report.elements_compared
        for link in (link for rank in report.adaptra for link in rank["links"].values()):
            result.switches += link["paths"]["switches"]
            result.by_device += link["paths"]["sent_by_device"]
            result.by_host += link["paths"]["sent_by_host"]
            result.doubles += link["doubles"]
    if result.switches < campaign.flaps:
        result.problems.append(f"links switched paths {result.switches} times instead of {campaign.flaps} or more")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.soak", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("build/soak"), help="directory for all that is written")
    parser.add_argument("--seed", default=Campaign.seed)
    parser.add_argument("--rounds", type=int, default=1, help="how often to do all of the following")
    parser.add_argument("--kills", type=int, default=Campaign.kills, help="SIGKILLs of delegates")
    parser.add_argument("--stops", type=int, default=Campaign.stops, help="SIGSTOPs of delegates and ranks")
    parser.add_argument("--long-stops", type=int, default=Campaign.long_stops, help="SIGSTOPs of ranks for long")
    parser.add_argument("--long-stop-s", type=float, default=Campaign.long_stop_s, help="how long these are")
    parser.add_argument("--store-stops", type=int, default=Campaign.store_stops, help="SIGSTOPs of the job's store")
    parser.add_argument(
        "--spoilt-rings",
        dest="corrupted_rings",
        type=int,
        default=Campaign.corrupted_rings,
        help="corrupted words of rings",
    )
    parser.add_argument(
        "--unauthenticated-peers",
        type=int,
        default=Campaign.unauthenticated_peers,
        help="floods of unproven connections",
    )
    parser.add_argument("--signals", type=int, default=Campaign.signals, help="SIGTERMs and SIGHUPs to delegates")
    parser.add_argument("--path-faults", type=int, default=Campaign.path_faults, help="device paths that die")
    parser.add_argument("--flaps", type=int, default=Campaign.flaps, help="least number of changes of path")
    parser.add_argument("--spacing", type=int, default=Campaign.spacing, help="iterations between two faults")
    args = parser.parse_args(argv)
    numbers = {name: value for name, value in vars(args).items() if name not in ("output", "seed")}
    if min(args.rounds, args.spacing) < 1 or min(numbers.values()) < 0:
        parser.error("--rounds and --spacing must be at least 1, the others at least 0")
    campaign = Campaign(**{name: value for name, value in vars(args).items() if name != "output"})
    try:
        return _run(campaign, args.output)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the ranks are ended\n")
        return 130
    except (LaunchError, ForkServerError, OSError) as error:
        sys.stderr.write(f"the campaign failed: {error}\n")
        return 1


def _run(campaign: Campaign, output: Path) -> int:
    records: list[TrainingRecord] = []
    reports = []
    with ForkServer() as server:
        for number in range(1, campaign.rounds + 1):
            report = run_round(campaign, number, output / f"round{number}", server, _say)
            reports.append(report)
            records += report.records
            _say(f"\n{table(report.records)}\n")
            _say(
                f"{report.switches} changes of path; {report.by_device} messages by the device path and "
                f"{report.by_host} by the host path, {report.doubles} doubles dropped; {report.elements_compared:,} "
                f"numbers compared with stock's; {report.seconds:.0f} s"
            )
            for problem in report.problems:
                sys.stderr.write(f"{problem}\n")
    if len(reports) > 1:
        _say(f"\nall {len(reports)} rounds:\n{table(records)}\n")
    summary = output / "summary.json"
    summary.write_text(json.dumps([report.summary() for report in reports], indent=1) + "\n")
    held = not any(report.problems for report in reports)
    _say(f"{'everything held' if held else 'NOT everything held'}; summary  {summary}")
    return 0 if held else 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
