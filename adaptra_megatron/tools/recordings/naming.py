# SPDX-License-Identifier: Apache-2.0
"""Parse names of events, arguments, processes and threads: type, place and time of an action."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from adaptra_megatron.tools.replay.operations import OpType

_KINDS = {
    **dict.fromkeys(("forward", "fwd", "f", "fprop"), OpType.FORWARD),
    **dict.fromkeys(("backward", "bwd", "b", "bprop"), OpType.BACKWARD),
    **dict.fromkeys(("i", "dgrad"), OpType.BACKWARD_INPUT),
    **dict.fromkeys(("w", "wgrad"), OpType.BACKWARD_WEIGHT),
}
_GRADIENTS = {
    **dict.fromkeys((("input", "grad"), ("grad", "input")), OpType.BACKWARD_INPUT),
    **dict.fromkeys((("weight", "grad"), ("grad", "weight")), OpType.BACKWARD_WEIGHT),
}
_HALVES = {"input": OpType.BACKWARD_INPUT, "weight": OpType.BACKWARD_WEIGHT}
_FILLERS = frozenset(("step", "compute", "pass", "warmup", "warm", "up", "steady", "cooldown", "cool", "down", "model"))
"""Words that are ignored. Any other word means that the name is not that of an action."""
_WORDS = {
    **dict.fromkeys(("mb", "microbatch", "micro", "batch", "m"), "micro_batch"),
    **dict.fromkeys(("chunk", "vp"), "chunk"),
    **dict.fromkeys(("iteration", "iter"), "step"),
    **dict.fromkeys(("stage", "pp"), "stage"),
}
"""Words before a number, by label of the number."""
_KEYS = {
    "step": ("iteration", "step", "iter"),
    "stage": ("pp_rank", "pp_rk", "pp_stage", "pipeline_rank", "pipeline_parallel_rank", "stage", "stage_id", "pp"),
    "replica": ("dp_rank", "dp_rk", "data_parallel_rank", "replica", "dp"),
    "lane": ("tp_rank", "tp_rk", "tensor_parallel_rank", "lane", "tp"),
    "rank": ("g_rk", "global_rank", "rank"),
    "chunk": ("model_chunk", "chunk", "vp_stage", "mc"),
    "micro_batch": ("microbatch", "micro_batch", "mb_id", "mb", "microbatch_id"),
}
"""Names of arguments by label; the first one present counts."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TOKENS = re.compile(r"[a-z]+|\d{1,18}")
_PLAIN = re.compile(r"[\w \-#:=,.()\[\]/]{1,80}", re.ASCII)
_TORCH = re.compile(r"(?:PP:)(\d{1,9})(F|BW|B|I|W)(\d{1,9})", re.ASCII)
_TORCH_BOTH = re.compile(r"PP:\((\d{1,9})F(\d{1,9});(\d{1,9})BW?(\d{1,9})\)OVERLAP_F_B", re.ASCII)
_STEP = re.compile(
    r"(?:iteration|iter|(?:train(?:ing)?[ _]?)?step|ProfilerStep)[ _#:=]*(\d{1,18})", re.IGNORECASE | re.ASCII
)
_RECEIVE = re.compile(r"(?:gloo|nccl|mpi|ucc|c10d|xccl)::?_?(?:i?recv|recv_any_source)(?:\b.*)?", re.IGNORECASE)
_RANK = r"[ _-]*(?:parallel)?[ _-]*(?:rank|stage|rk)?[ _:=#\[-]*(\d{1,9})"
_LABELS = {
    "stage": re.compile(rf"(?<![a-z])(?:pp|pipeline|stage){_RANK}", re.IGNORECASE),
    "replica": re.compile(rf"(?<![a-z])(?:dp|data|replica){_RANK}", re.IGNORECASE),
    "lane": re.compile(rf"(?<![a-z])(?:tp|tensor|lane){_RANK}", re.IGNORECASE),
}
_GLOBAL = re.compile(r"(?<![a-z])rank[ _:=#\[-]*(\d{1,9})", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,9})\D*", re.ASCII)
_OPTYPES = {optype.value: optype for optype in OpType}

Labels = dict[str, int]
"""Values of the labels step, stage, replica, lane, rank, chunk and micro-batch, as far as given."""


class Named(NamedTuple):
    """Parts of the name of an event."""

    optype: OpType
    labels: Mapping[str, int]
    virtual_stage: int | None = None
    """For torch.distributed.pipelining's actions, whose time on the host includes the wait for their message."""
    then: Named | None = None
    """The backward in the same range as this forward, as in torch's OVERLAP_F_B."""


@lru_cache(maxsize=1 << 14)
def named(name: str) -> Named | None:
    """Return the action, message or collective that `name` denotes; None for other events."""
    text = name.strip()
    if text.lower() in _OPTYPES:
        return Named(_OPTYPES[text.lower()], {})
    torch = _TORCH.fullmatch(text)
    if torch is not None:
        return Named(_KINDS[torch[2][0].lower()], {"micro_batch": int(torch[3])}, int(torch[1]))
    both = _TORCH_BOTH.fullmatch(text)
    if both is not None:
        backward = Named(OpType.BACKWARD, {"micro_batch": int(both[4])}, int(both[3]))
        return Named(OpType.FORWARD, {"micro_batch": int(both[2])}, int(both[1]), backward)
    if _PLAIN.fullmatch(text) is None:
        return None
    first, *tokens = _TOKENS.findall(text.lower()) or [""]
    optype = _GRADIENTS.get((first, *tokens[:1]))
    if optype is not None:
        del tokens[0]
    else:
        optype = _KINDS.get(first)
    return None if optype is None else _read(optype, tokens)


def _read(optype: OpType, tokens: list[str]) -> Named | None:
    labels: Labels = {}
    what = "micro_batch"
    for place, token in enumerate(tokens):
        if token.isdigit():
            if labels.setdefault(what, int(token)) != int(token):
                return None
            what = "micro_batch"
        elif token in _HALVES and place == 0 and optype is OpType.BACKWARD:
            optype = _HALVES[token]
        elif token in _WORDS:
            what = _WORDS[token]
        elif token not in _FILLERS:
            return None
    return Named(optype, labels)


@lru_cache(maxsize=1 << 14)
def step_of(name: str) -> int | None:
    """Return the number of the step that a range called `name` encloses; None for other ranges."""
    found = _STEP.fullmatch(name.strip())
    return None if found is None else int(found[1])


@lru_cache(maxsize=1 << 14)
def receives(name: str) -> bool:
    """Return whether a range called `name` waits for a message."""
    return _RECEIVE.fullmatch(name) is not None


@lru_cache(maxsize=1 << 10)
def _in_lower_case(key: str) -> str:
    """Convert a name to lower case, such as "microBatch" to "micro_batch", "PP_Rank" to "pp_rank"."""
    return _HUMP.sub("_", key).lower()


def labels_of_args(args: Any) -> Labels:
    """Return the labels in an event's arguments."""
    if not isinstance(args, dict):
        return {}
    found: Labels = {}
    values = {_in_lower_case(key): value for key, value in args.items() if isinstance(key, str)}
    for label, keys in _KEYS.items():
        for key in keys:
            if (number := whole(values.get(key))) is not None:
                found[label] = number
                break
    return found


def labels_of_text(text: Any) -> Labels:
    """Return the labels in the name of a process or thread, such as "PP rank 1, TP rank 0", "DP0-PP1-TP0", "stage 3",
    "rank 7"."""
    if not isinstance(text, str) or len(text) > 200:
        return {}
    found: Labels = {}
    for label, pattern in _LABELS.items():
        match = pattern.search(text)
        if match is not None:
            found[label] = int(match[1])
            text = text[: match.start()] + text[match.end() :]
    match = _GLOBAL.search(text)
    return found if match is None else {**found, "rank": int(match[1])}


def whole(value: Any) -> int | None:
    """Return a non-negative integer, also from text that ends in one, such as "stage1"; None for anything else."""
    if isinstance(value, str):
        match = _LAST_NUMBER.fullmatch(re.sub(r"^\D*", "", value[:80])) if not value.startswith("-") else None
        return None if match is None else int(match[1])
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if 0 <= value < 1 << 62 and value == int(value) else None


def seconds_of(value: Any) -> float | None:
    """Return a time, also from text; None if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
