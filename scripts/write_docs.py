#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the reference: pages of docs/ that are made from the code or from scripts/reference/, and a JSON Schema.

scripts/write_docs.py           writes them
scripts/write_docs.py --check   exit status 1, and the names of those that are out of date
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from event_docs import events_page, events_schema
from markdown_table import markdown_table
from reference_docs import cli_page, environment_page, messages_page, refusals_page

from adaptra_megatron.config import add_adaptra_arguments
from adaptra_megatron.engine.bootstrap import HOOKS
from adaptra_megatron.engine.iteration_hooks import IterationHooks
from adaptra_megatron.schedule.order_registry import SCHEDULES
from adaptra_megatron.telemetry.exported_figures import METRICS

REPOSITORY = Path(__file__).resolve().parent.parent

PATCHES_HEAD = """# Changes in Megatron

All of it, made from the tables in the code by `scripts/write_docs.py`. Nothing of Megatron's files is edited. Without
`--adaptra` none of this happens; `.undo()` of what `adaptra_megatron.patches.enable` returns puts everything back.
"""


def patches_page() -> str:
    """docs/patches.md. Imports Megatron."""
    from adaptra_megatron.patches import PATCHES, TRAINING_PATCHES, WATCHING_PATCHES
    from adaptra_megatron.patches.cuda_graphs import CAPTURE_PATCHES
    from adaptra_megatron.patches.rank_failure_patches import FAULT_TOLERANCE_PATCHES
    from adaptra_megatron.patches.update_patches import GRADIENT_PATCHES, STAGGERING_PATCHES, UPDATE_PATCHES

    from adaptra_megatron.megatron.compat import DIFFERENCES

    hooks = markdown_table(("replaced", "why"), [(f"`{target}`", why) for target, why in HOOKS.items()])
    patches = markdown_table(
        ("patch", "replaced", "megatron-core", "why"),
        [
            (patch.identity, f"`{patch.target}`", f"`{patch.versions}`", patch.reason)
            for patch in (
                *PATCHES,
                *TRAINING_PATCHES,
                *FAULT_TOLERANCE_PATCHES,
                *GRADIENT_PATCHES,
                *STAGGERING_PATCHES,
                *UPDATE_PATCHES,
                *WATCHING_PATCHES,
                *CAPTURE_PATCHES,
            )
        ],
    )
    differences = markdown_table(
        ("since", "what differs", "seen by"), [(one.since, one.what, one.seen_by) for one in DIFFERENCES]
    )
    return f"""{PATCHES_HEAD}
## To get in
When its module is imported, and only in processes that were asked to ([how](get_started.md#how-it-gets-in)):

{hooks}

## To run
Together or not at all, once the command line has been read. Each is refused unless the function has the parameters that
its replacement relies on:

{patches}

## Differences between releases
Distinguished by what is there, in one module (`adaptra_megatron/megatron/compat.py`), never by the version:

{differences}
"""


RAN_ON = {
    "--adaptra-host-transport": "CPUs (shm, tcp); Soft-RoCE (verbs)",
    "--adaptra-rnics": "Soft-RoCE",
    "--adaptra-memory-fraction": "models of GPUs",
    "--adaptra-queue-model": "models of GPUs",
}
"""What each flag has run on, but for those that have run on CPUs over gloo. None has run on GPUs yet."""


def _releases() -> dict[str, str]:
    """Return the releases of megatron-core that each flag works with, where they are not all supported ones."""
    from adaptra_megatron.patches.update_patches import GRADIENT_PATCHES, STAGGERING_PATCHES, UPDATE_PATCHES

    return {
        "--adaptra-gradient-sync": f"`{GRADIENT_PATCHES[0].versions}`",
        "--adaptra-staggered-optimizer": f"`{STAGGERING_PATCHES[0].versions}`",
        "--adaptra-sync-mode": f"`{UPDATE_PATCHES[0].versions}`",
        "--adaptra-max-staleness": f"`{UPDATE_PATCHES[0].versions}`",
    }


def flags_page() -> str:
    """docs/flags.md. Imports Megatron."""
    from adaptra_megatron.patches.table import SUPPORTED

    parser = add_adaptra_arguments(argparse.ArgumentParser(add_help=False))
    rows, releases = [], _releases()
    for action in parser._actions:
        name = action.option_strings[0]
        values = f"{{{','.join(action.choices)}}}" if action.choices else action.metavar
        takes_none = action.nargs == 0
        flag = f"`{name}{'' if takes_none else f' {values or action.dest.upper()}'}`"
        default = "off" if takes_none else "" if action.default in (None, ()) else f"`{action.default}`"
        status = (releases.get(name, "all"), RAN_ON.get(name, "CPUs"))
        rows.append((flag, default, *status, " ".join(str(action.help).split())))
    return f"""# Flags

As `pretrain_gpt.py --adaptra --help` shows them under `adaptra`. Made from the parser by `scripts/write_docs.py`.
*Releases*: of megatron-core; *all* are `{SUPPORTED}`. *Ran on*: CPUs means over gloo; nothing has run on GPUs yet
([status](versions.md#hardware-status)).

{markdown_table(("flag", "default", "releases", "ran on", "meaning"), rows)}

`ADAPTRA_DISABLE=1` in the environment leaves Megatron as it is, whatever the flags
([turning it off](get_started.md#turn-it-off)).
"""


def schedules_page() -> str:
    """docs/schedules.md."""
    rows = [
        (f"`{name}`", named.chunks_text, str(named.generator.__doc__).partition("\n")[0], f"`{_path(named.generator)}`")
        for name, named in SCHEDULES.items()
    ]
    return f"""# Schedules

Orders of actions that have names, for `adaptra simulate COSTS.json --schedule NAME`; with `--csv FILE` it writes one
for `--adaptra-plan-csv FILE`. Made by `scripts/write_docs.py` from
`adaptra_megatron.schedule.order_registry.SCHEDULES`, [where to add one](extending.md#an-order-of-actions). The
names `planned` and `online` stand for what the [planner](planner.md) finds and for [online
dispatch](planner.md#online-dispatch).

{markdown_table(("name", "per stage", "what it is", "made by"), rows)}
"""


def _path(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__name__}"


def metrics_page() -> str:
    """docs/metrics.md."""
    rows = [
        (
            f"`{name}{'_total' if metric.counter else ''}`",
            "counter" if metric.counter else "gauge",
            ", ".join(
                f"`{label}`" for label in ((("replica",) if metric.of_job else ("rank", "stage")) + metric.labels)
            ),
            metric.meaning,
        )
        for name, metric in METRICS.items()
    ]
    return f"""# Metrics

What `--adaptra-prometheus-port` serves and `--adaptra-otel` sends ([how](telemetry.md)), made by
`scripts/write_docs.py` from `adaptra_megatron.telemetry.exported_figures.METRICS`. Names and labels are only ever
added. Metrics with the label `rank` are each rank's own; those with `replica` come from the leading rank of that
replica alone, whose plans and findings they are about. What is not known or not used is left out.

{markdown_table(("metric", "type", "labels", "meaning"), rows)}

`extras/grafana.json` is a dashboard of them (Grafana: Dashboards, New, Import), `extras/alerts.yml` has alerting rules
(`rule_files` of Prometheus), which `promtool test rules extras/alerts_test.yml` tries out.
"""


HOOKS_HEAD = """# Hooks

Made by `scripts/write_docs.py` from `adaptra_megatron.engine.iteration_hooks.IterationHooks` and an example, which a
test runs. Rerouting, recovery, staggered steps, synchronisation modes, the straggler watch and profiling are such
hooks: the engine calls their methods and names none of them, and `adaptra_megatron.engine.features.make_features`
imports those that a flag asks for. A feature that lives as long as the process is an
`adaptra_megatron.engine.iteration_hooks.EngineFeature`. Hooks of your own come after all others, so that what they
wrap is outermost. Each method does nothing, or returns what it is given, unless you override it.
"""


def hooks_page() -> str:
    """docs/hooks.md."""
    rows = []
    for name, method in inspect.getmembers(IterationHooks, inspect.isfunction):
        if not name.startswith("_"):
            given = ", ".join(f"`{each}`" for each in list(inspect.signature(method).parameters)[1:])
            rows.append(
                (method.__code__.co_firstlineno, f"`{name}`", given, (inspect.getdoc(method) or "").replace("\n", " "))
            )
    table = markdown_table(("method", "is given", "is to"), [row[1:] for row in sorted(rows)])
    example = (REPOSITORY / "examples" / "slowest_action.py").read_text()
    return f"""{HOOKS_HEAD}
`self.pipeline` is this rank's `adaptra_megatron.engine.pipeline.Pipeline`: its `job`, `transport`, `book` of plans,
`exchange`, `telemetry` and counters.

{table}

`examples/slowest_action.py`:

```python
{example}```
"""


FILES = {
    "docs/hooks.md": hooks_page,
    "docs/patches.md": patches_page,
    "docs/flags.md": flags_page,
    "docs/schedules.md": schedules_page,
    "docs/metrics.md": metrics_page,
    "docs/events.md": events_page,
    "docs/cli.md": cli_page,
    "docs/messages.md": messages_page,
    "docs/environment.md": environment_page,
    "docs/refusals.md": refusals_page,
    "extras/events.schema.json": events_schema,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say which pages are out of date")
    check = parser.parse_args().check
    stale = []
    for name, page in FILES.items():
        path, text = REPOSITORY / name, page()
        if not path.is_file() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    for name in stale:
        print(f"{name} {'is out of date: run scripts/write_docs.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
