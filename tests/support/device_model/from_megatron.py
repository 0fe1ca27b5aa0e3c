# SPDX-License-Identifier: Apache-2.0
"""What stock Megatron calls, recorded from its own schedules and its own P2PCommunicator, one stage at a time.

Replaced are what computes (forward_step, backward_step) and torch's functions that talk to other ranks or the device.
As over NCCL: batch_isend_irecv makes one kernel on the group's communicator; an isend or irecv alone goes to a
communicator of the two ranks, with one stream for both directions (torch's lazy mode); waiting for either makes the
current stream wait; `batch_p2p_sync` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import ModelParallelConfig
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import p2p_communication, schedules, utils
from megatron.core.process_groups_config import ProcessGroupCollection
from support.device_model.calls import Program, Transfer
from support.device_model.recording import Recorder

from adaptra_megatron.schedule.costs import Costs
from adaptra_megatron.schedule.ir import Action, Kind


def record_stock(
    stage: int, costs: Costs, *, training: bool = True, overlap: bool = False, varying: bool = False
) -> Program:
    """All calls of one iteration of a rank of `stage`. `overlap`: Megatron's overlap_p2p_comm, for several chunks;
    `varying`: its variable_seq_lengths."""
    calls = _Calls(Recorder(), stage, costs)
    chunks, micro_batches = costs.chunks, costs.micro_batches
    config = ModelParallelConfig(
        pipeline_model_parallel_size=costs.stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=costs.stages,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
        variable_seq_lengths=varying,
        deallocate_pipeline_outputs=False,
    )
    config.hidden_size = 1
    for missing in ("cuda_graph_impl", "fine_grained_activation_offloading", "mtp_standalone"):
        if not hasattr(config, missing):
            setattr(config, missing, None)
    models = [_model(config, chunk if chunks > 1 else None) for chunk in range(chunks)]
    group = _Group(stage, costs.stages)
    groups = ProcessGroupCollection()
    one = _Group(0, 1)
    groups.tp = groups.cp = groups.dp_cp = one
    groups.embd, groups.pos_embd, groups.pp = None, None, group
    with calls.in_force():
        interleaved = schedules.forward_backward_pipelining_with_interleaving
        run: Callable[..., Any] = (
            interleaved if chunks > 1 else schedules.forward_backward_pipelining_without_interleaving
        )
        run(
            forward_step_func=None,
            data_iterator=[None] * chunks if chunks > 1 else None,
            model=models if chunks > 1 else models[0],
            num_microbatches=micro_batches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=not training,
            p2p_communicator=p2p_communication.P2PCommunicator(group, config),
            pg_collection=groups,
        )
    return calls.recorder.program


class _Group:
    """A process group of consecutive ranks from 0."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _model(config: Any, chunk: int | None) -> torch.nn.Module:
    model = torch.nn.Identity()
    model.config, model.model_type = config, ModelType.encoder_or_decoder  # type: ignore[assignment]
    model.vp_stage = chunk  # type: ignore[assignment]
    return model


class _Request:
    """What isend and irecv return."""

    def __init__(self, recorder: Recorder, work: int) -> None:
        self._recorder, self._work = recorder, work

    def wait(self) -> None:
        """The current stream waits."""
        self._recorder.make_wait(self._work)


class _Operation(SimpleNamespace):
    """torch.distributed.P2POp."""

    def __init__(self, op: Any, tensor: torch.Tensor, peer: int, group: Any = None) -> None:
        super().__init__(op=op, peer=peer)


class _Calls:
    """Stands in for torch and for what computes, and writes all of it down."""

    def __init__(self, recorder: Recorder, stage: int, costs: Costs) -> None:
        self.recorder = recorder
        self._stage, self._costs = stage, costs
        self._backwards = [0] * costs.chunks
        self._chunk_of: dict[int, int] = {}
        self._groups: dict[int, str] = {}

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """While Megatron's functions run."""
        distributed = _Instead(
            torch.distributed,
            isend=self._isend,
            irecv=self._irecv,
            P2POp=_Operation,
            batch_isend_irecv=self._batch,
            get_backend=lambda group: "nccl",
            get_global_rank=lambda group, rank: rank,
            group=SimpleNamespace(WORLD="world"),
        )
        cuda = _Instead(torch.cuda, synchronize=self.recorder.device_wait, current_device=lambda: "cpu")

        def zeros(*shape: Any, device: Any = None, **how: Any) -> torch.Tensor:
            return torch.zeros(*shape, **how)

        instead = _Instead(torch, distributed=distributed, cuda=cuda, zeros=zeros, empty=zeros)
        with ExitStack() as stack:
            for owner, names in (
                (p2p_communication, {"torch": instead, "dist": distributed}),
                (utils, {"get_pg_rank": _Group.rank, "get_pg_size": _Group.size}),
                (
                    schedules,
                    {"torch": instead, "forward_step": self._forward, "backward_step": self._backward},
                ),
            ):
                stack.enter_context(mock.patch.multiple(owner, **names))
            yield

    def _forward(self, *arguments: Any, current_microbatch: int, vp_stage: int | None = None, **_: Any) -> Any:
        self._compute(Kind.FORWARD, vp_stage or 0, current_microbatch, self._costs.forward_s)
        output = torch.zeros(1)
        self._chunk_of[id(output)] = vp_stage or 0
        self._kept = [*getattr(self, "_kept", ()), output]  # an id is a tensor's while that lives
        return output, torch.zeros([], dtype=torch.int)

    def _backward(self, input_tensor: Any, output_tensor: Any, *_: Any) -> torch.Tensor:
        output = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
        chunk = self._chunk_of[id(output)]
        self._compute(Kind.BACKWARD, chunk, self._backwards[chunk], self._costs.whole_backward_s)
        self._backwards[chunk] += 1
        return torch.zeros(1)

    def _compute(self, kind: Kind, chunk: int, micro_batch: int, table: Sequence[Sequence[float]]) -> None:
        self.recorder.compute(table[self._stage][chunk], (0, Action(self._stage, kind, chunk, micro_batch)))

    def _isend(self, tensor: torch.Tensor, dst: int, group: Any) -> _Request:
        return self._single(self._stage, dst, group)

    def _irecv(self, tensor: torch.Tensor, src: int, group: Any) -> _Request:
        return self._single(src, self._stage, group)

    def _single(self, source: int, target: int, group: Any) -> _Request:
        name = f"{'world' if group == 'world' else 'pipeline'} {min(source, target)}:{max(source, target)}"
        return _Request(self.recorder, self.recorder.transfer(name, name, self._transfer(source, target)))

    def _batch(self, operations: Iterable[_Operation]) -> list[_Request]:
        transfers = [
            self._transfer(*((self._stage, each.peer) if each.op == self._isend else (each.peer, self._stage)))
            for each in operations
        ]
        return [_Request(self.recorder, self.recorder.transfer("pipeline", "pipeline", *transfers))]

    def _transfer(self, source: int, target: int) -> Transfer:
        cost = self._costs.link(source, target)
        return Transfer(source, target, "a message", cost.occupancy_s + cost.latency_s)


class _Instead:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
