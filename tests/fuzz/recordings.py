# SPDX-License-Identifier: Apache-2.0
"""Recordings of every kind, spoilt, into `adaptra analyze`: an answer or one line, and never a traceback.

Run by itself for a while: python -m fuzz.recordings --seconds=60 (with tests on PYTHONPATH).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from support.made_up.foreign import blocking, in_step, kineto, named, overlapped, with_args
from support.made_up.runs import Iteration, write_run

from adaptra_megatron.tools.cli.main import main as adaptra
from fuzz.mutations import spoil_stream

_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2, 7, 1 << 31, 1 << 63, -(1 << 70), 0.5, -0.0, 1e-300, 1e300, "", "0", "stage1", "rank 3",
    "x" * 300, [], [1], {}, {"rank": 1}, "1e400", "NaN", "forward", "backward 2", "ProfilerStep#3", "PP:1F2",
    "gpu_user_annotation", "X", "B", "E", "b", "e", "M",
)  # fmt: skip
_OPTIONS = ((), ("--stages", "2"), ("--stages", "3"), ("--replicas", "2"), ("--steps", "0-5"))
_JOBS = (
    overlapped(2, 3),
    [*overlapped(2, 3), *overlapped(2, 3, replica=1, delay=0.0)],
    overlapped(3, 4, delay=lambda a, b: 15e3 if a == 1 else 0.0),
    blocking(3, 4, lambda a, b: 5e3),
    blocking(2, 2, lambda a, b: 100.0, chunks=2),
)


def case(random: Random) -> None:
    """One recording, spoilt."""
    with tempfile.TemporaryDirectory() as directory:
        path = _recording(random, Path(directory))
        _spoil_files(random, path)
        check(path, *random.choice(_OPTIONS))


def check(path: Path, *options: str) -> None:
    """Analyse; what is refused is refused in one line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = adaptra(["analyze", str(path), "--json", "--no-progress", *options])
    reported = json.loads(out.getvalue())
    assert status in (0, 1, 2), status
    assert ("error" in reported) == (status == 2)
    if status == 2:
        assert len(reported["error"]) < 3000
        assert "('" not in reported["error"], reported["error"]
    else:
        assert reported["understood"] == (status == 0)


def _recording(random: Random, directory: Path) -> Path:
    ran = random.choice(_JOBS)
    kind = random.randrange(6)
    if kind == 0:
        write_run(directory, [Iteration(delay_s=random.choice((0.0, 0.5))) for _ in range(2)])
        return directory
    if kind == 1:
        return kineto(directory / "run", [each for each in ran if not each.replica])
    if kind == 2:
        return _parquet(random, directory, ran)
    if kind == 3:
        return _primus(directory, ran)
    events = with_args(ran) if kind == 4 else in_step(named(ran))
    for _ in range(random.choice((0, 1, 1, 2, 5, 20))):
        _spoil_event(random, events)
    document: Any = events if random.random() < 0.5 else {"traceEvents": events, "displayTimeUnit": "ms"}
    if isinstance(document, dict) and random.random() < 0.5:
        document[random.choice(("distributedInfo", "baseTimeNanoseconds", "x"))] = _value(random)
    path = directory / random.choice(("trace.json", "trace.json.gz", "trace"))
    text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text) if random.random() < 0.3 else text)
    return path


def _spoil_event(random: Random, events: list[Any]) -> None:
    at = random.randrange(len(events))
    event = events[at]
    choice = random.randrange(8)
    if choice == 0:
        events.pop(at) if len(events) > 1 else None
    elif choice == 1:
        events.insert(at, json.loads(json.dumps(random.choice(events))))
    elif choice == 2:
        events[at] = _value(random)
    elif isinstance(event, dict):
        target = event.get("args") if choice == 3 and isinstance(event.get("args"), dict) else event
        assert isinstance(target, dict)
        key = random.choice([*target, "args", "cat", "id", "dur", "ts", "ph"])
        target[key] = _moved(random, target.get(key)) if choice > 5 else _value(random)


def _value(random: Random) -> Any:
    """One of its own: an event that is spoilt again would change what later cases get."""
    return copy.deepcopy(random.choice(_VALUES))


def _moved(random: Random, value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value + random.choice((-1, 1, 1e3, -1e3, 1e5))
    return value


def _parquet(random: Random, directory: Path, ran: list[Any]) -> Path:
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "dp_rank": each.replica, "stage": each.stage, "step": 1, "optype": each.kind.value,
            "start_ts": each.start * 1e-6, "duration": each.duration * 1e-6, "seq_id": each.micro_batch,
            "mc": each.chunk, "mb_id": each.micro_batch,
        }
        for each in ran
    ]  # fmt: skip
    for _ in range(random.choice((0, 1, 2, 8))):
        row = random.choice(rows)
        key = random.choice(list(row))
        row[key] = random.choice((None, -1, 0, 3, 99)) if key != "optype" else random.choice(("gc", "loss", None))
    path = directory / "trace.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _primus(directory: Path, ran: list[Any]) -> Path:
    for stage in range(1 + max(each.stage for each in ran)):
        row: dict[str, list[float]] = {}
        for prefix, name in (("fwd", "forward-compute"), ("bwd", "backward-compute")):
            own = [each for each in ran if each.stage == stage and each.kind.value == name]
            row[f"{prefix}_start"], row[f"{prefix}_end"] = [e.start for e in own], [e.end for e in own]
        (directory / f"pp_rank_{stage}.json").write_text(json.dumps({"1": row}))
    return directory


def _spoil_files(random: Random, path: Path) -> None:
    """Bytes of one file, in half of the cases; a file that is not there, now and then."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    chosen = random.choice([each for each in files if each.is_file()])
    choice = random.random()
    if choice < 0.4:
        chosen.write_bytes(spoil_stream(random, chosen.read_bytes()))
    elif choice < 0.45 and path.is_dir():
        chosen.unlink()
    elif choice < 0.5:
        chosen.write_bytes(chosen.read_bytes()[: random.randrange(chosen.stat().st_size + 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Analyse spoilt recordings; stops at the first traceback.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=1, help="number of the first case; each number is another input")
    chosen = parser.parse_args()
    end_s, number = time.monotonic() + chosen.seconds, chosen.first
    while time.monotonic() < end_s:
        try:
            case(Random(number))
        except Exception:
            print(f"case {number} failed: --first={number}")  # noqa: T201
            raise
        number += 1
    print(f"{number - chosen.first} recordings, no traceback")  # noqa: T201


if __name__ == "__main__":
    main()
