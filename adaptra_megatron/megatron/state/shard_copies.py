# SPDX-License-Identifier: Apache-2.0
"""Extend Megatron's distributed optimizer by a copy of each shard of its state at a rank of another cell.

The copy is computed rather than sent. Its holder gets the shard's reduced gradients as the owner does (one more shard
of gradients, 1/D of the buffer, at the end of each reduction) and takes the same steps with the same numbers. So copy
and shard are equal bit for bit, and a failure at any moment leaves a complete copy. It costs the memory of one more
shard (12 bytes per parameter over D, with Adam and 16-bit parameters) and the time of its step.

If the owner has failed, the holder of the copy adds the shard's part to gradient norms, provides its parameters in
gathers, and writes it into checkpoints.

If the optimizer has several instances, each has all shards, so none is copied: see `OptimizerInstance`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.elastic.process_group_manager import alike
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError
from adaptra_megatron.megatron.state.stored_state import allocate, allocates, flat_bytes, stored_state

if TYPE_CHECKING:
    from adaptra_megatron.elastic.process_group import FaultTolerantGroup


# Several instances of Megatron's distributed optimizer (--num-distributed-optimizer-instances).
# Each instance has all shards of the optimizer's state, over a part of the replicas: ranks that have the same place
# in their instances have the same shard, and take the same steps with the same gradients (param_and_grad_buffer.py:
# reduced and scattered within each instance, then all-reduced over the instances). So a shard survives its owner,
# and needs no copy.
# Where ranks have died, groups within an instance are joined over all instances: gradients are reduced over all that
# live, which leaves nothing to add up over the instances; parameters are gathered from the lowest rank that has each
# shard, and that one counts in gradient norms and writes the shard into checkpoints.


class OptimizerInstance:
    """Links one optimizer of an instance to its counterparts in the other instances."""

    def __init__(self, optimizer: Any, layout: JobLayout) -> None:
        """Raises ValueError if instances do not consist of whole replicas."""
        self._optimizer, self._rank = optimizer, layout.rank
        self._group: FaultTolerantGroup = optimizer.data_parallel_group
        instances = optimizer.ddp_config.num_distributed_optimizer_instances
        self._group.has_shards = True
        for group in (self._group, optimizer.get_grad_stats_parallel_group()):
            group.instances = instances
            alike(group, layout)
        for chunk in optimizer.model_chunks:
            for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                over = bucket_group.inter_distributed_optimizer_instance_group
                over.adds_instances = True
                if list(over.ranks) != self._same:
                    raise ValueError(
                        f"--num-distributed-optimizer-instances {instances} does not divide the {layout.replicas} "
                        f"replicas, and ranks {list(over.ranks)} have parts of one replica's shards"
                    )

    @property
    def _same(self) -> list[int]:
        """Ranks that hold this rank's shard, by instance."""
        assert self._group.alike is not None
        return list(self._group.alike[self._rank])

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Number only live instances within this context: the first one writes checkpoints."""
        before = self._optimizer.distributed_optimizer_instance_id
        live = [rank for rank in self._same if rank in self._group.members]
        self._optimizer.distributed_optimizer_instance_id = live.index(self._rank)
        try:
            yield
        finally:
            self._optimizer.distributed_optimizer_instance_id = before


def holders_of(layout: JobLayout, ranks: Sequence[int]) -> list[int]:
    """Return the index of each member's holder in a group of `ranks`: in another cell and, if possible, on another
    host. It is the same for the corresponding ranks of all stages.

    Gradients of tied embeddings are summed up over the first and the last stage before they are stepped: at both, a
    rank must have reduced the same parts, its own and the one that it holds a copy of. Raises ValueError if there is no
    other cell.
    """
    here = [layout.workers[rank] for rank in ranks]
    at = {(each.cell.replica, each.lane, each.cell.stage): each for each in layout.workers.values()}
    stages = sorted({each.cell.stage for each in layout.workers.values()})
    rows = [[at.get((each.cell.replica, each.lane, stage), each) for each in here] for stage in stages]

    def apart(shift: int) -> tuple[bool, int]:
        pairs = [(each, row[(place + shift) % len(ranks)]) for row in rows for place, each in enumerate(row)]
        return all(a.cell != b.cell for a, b in pairs), sum(a.host != b.host for a, b in pairs)

    shifts, best = range(1, len(ranks)), (True, len(rows) * len(ranks))
    shift = next((each for each in shifts if apart(each) == best), 0) or max(shifts, key=apart, default=0)
    if not shift or not apart(shift)[0]:
        raise ValueError(f"ranks {list(ranks)} share shards, and no other replica could hold copies of them")
    return [(place + shift) % len(ranks) for place in range(len(ranks))]


_WRITTEN_BY_EACH = ("dp_reshardable", "fully_sharded_bucket_space", "fully_sharded_model_space")
"""Checkpoint formats in which each rank writes its own shard (DistributedOptimizer.sharded_state_dict, of all
releases).
"""


class MadeWith(NamedTuple):
    """Arguments that a distributed optimizer was created with."""

    groups: list[dict[str, Any]]
    """Groups of the model's parameters; the optimizer itself has those of its shard."""
    given: tuple[Any, ...]
    keywords: dict[str, Any]


class ShardCopy:
    """Copy of another rank's shard: an optimizer for that shard, whose parameters this rank's optimizer steps."""

    def __init__(self, own: Any, stock: type, made_with: MadeWith, layout: JobLayout, *, fill: bool) -> None:
        """Create the copy. With `fill`, fetch the owner's state, which is collective over the group. `stock`:
        Megatron's class.

        Raises the ValueError of `holders_of`.
        """
        self._own = own
        self._group: FaultTolerantGroup = own.data_parallel_group
        self._group.holders = holders_of(layout, self._group.ranks)
        self._place = self._group.holders.index(self._group.place)
        """Index of the owner in the group."""
        # Not by its constructor, whose arguments differ by optimizer: all but groups and state is this rank's own.
        inner = object.__new__(type(own.optimizer))
        inner.__dict__.update(own.optimizer.__dict__)
        inner.state, inner.param_groups = defaultdict(dict), made_with.groups
        parameters = [each for group in made_with.groups for each in group["params"] if hasattr(each, "main_param")]
        # Stock's constructor points `main_param` of the model's parameters at its own shard (distrib_optimizer.py,
        # _build_model_and_main_param_groups): it is set back below.
        main = [each.main_param for each in parameters]
        with self._group.seen_as(self._place):
            self.other: Any = stock(inner, *made_with.given, **made_with.keywords)
        for parameter, kept in zip(parameters, main, strict=True):
            parameter.main_param = kept
        if fill:
            self._fill()
        self._shared = {each: getattr(each, "shared", False) for each in _parameters(inner)}
        self._count(False)
        # One inner optimizer steps both shards, so no setting and no count of steps can differ between them.
        for group, more in zip(own.optimizer.param_groups, inner.param_groups, strict=True):
            group["params"] = [*group["params"], *more["params"]]
        own.optimizer.state.update(inner.state)

    @property
    def stands_in(self) -> bool:
        """Return whether the owner has failed."""
        return self._place in self._group.stood_in_for

    def parameters(self, *, own: bool) -> list[torch.Tensor]:
        """Return the main parameters of this rank's own shard, or of the copied one."""
        others = _parameters(self.other.optimizer)
        known = set(map(id, others))
        return [each for each in _parameters(self._own.optimizer) if id(each) not in known] if own else others

    def squares(self) -> torch.Tensor:
        """Return the sum of squares [1] of the gradients that the owner would add to the norm."""
        self.other.tp_group = getattr(self._own, "tp_group", None)
        self._count(True)
        grads = self.other.get_main_grads_for_grad_norm()
        self._count(False)
        none = torch.zeros(1, device=self._device)
        return sum((grad.float().square().sum() for grad in grads), none)

    def sharded_states(self, *given: Any, **keywords: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the checkpoint state of this rank's own shard, and that of a failed owner's shard or None.

        The own state is numbered as if no member had failed. Raises UnsupportedFeatureError if members have failed and
        the format gathers shards at one rank.
        """
        refuse_gathering(self._group, keywords)
        with self._group.seen_as(self._group.place):
            own = self._own.sharded_state_alone(*given, **keywords)
        if not self.stands_in:
            return own, None
        inner = self.other.optimizer
        for index, group in enumerate(self._own.optimizer.param_groups):
            inner.param_groups[index] = {**group, "params": inner.param_groups[index]["params"]}
        state = self._own.optimizer.state
        inner.state = {each: state[each] for each in _parameters(inner) if each in state}
        with self._group.seen_as(self._place):
            return own, self.other.sharded_state_dict(*given, **keywords)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._own.buffers[0].grad_data.device
        return device

    def _count(self, counted: bool) -> None:
        """Include the copy in Megatron's norms, or exclude it as Megatron excludes parameters that two stages share."""
        for each, shared in self._shared.items():
            each.shared = shared or not counted  # type: ignore[attr-defined]

    def _fill(self) -> None:
        """Fetch state that the owner may have loaded, before any member can fail."""
        own, inner = self._own.optimizer, self.other.optimizer
        if own.state:
            known = next(iter(own.state))
            for each in _parameters(inner):
                if allocates(inner):
                    allocate(inner, each, own.state[known])
                else:
                    inner.state[each] = {name: _like(value, known, each) for name, value in own.state[known].items()}
        given, received = map(flat_bytes, _tensors(own)), list(map(flat_bytes, _tensors(inner)))
        # Where gradients are: torch's Adam counts its steps in tensors on the CPU.
        none = torch.empty(0, dtype=torch.uint8, device=self._device)
        sizes = [each.numel() for each in received]
        found = none.new_empty(sum(sizes))
        self._group.hand_on(torch.cat([none, *(each.to(self._device) for each in given)]), found).wait()
        for each, came in zip(received, torch.split(found, sizes), strict=True):
            each.copy_(came)


def refuse_gathering(group: FaultTolerantGroup, keywords: Mapping[str, Any], what: str = "") -> None:
    """Raise UnsupportedFeatureError if members have failed and shards would be gathered at one rank.

    Shards are gathered if `what` is set, or if the format in `keywords` (of Megatron's sharded_state_dict) requires it.
    """
    metadata = keywords.get("metadata") or {}
    kind = keywords.get("sharding_type") or metadata.get("distrib_optim_sharding_type", "fully_sharded_model_space")
    if group.members != group.ranks and (what or kind not in _WRITTEN_BY_EACH):
        what = what or f"the format {kind} of the distributed optimizer's state"
        raise UnsupportedFeatureError(
            f"ranks have failed, and {what} gathers all shards at one rank, so this checkpoint cannot be written: go "
            "on from the one before, and use --ckpt-format torch_dist without --dist-ckpt-optim-fully-reshardable"
        )


def _parameters(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in inner.param_groups for each in group["params"]]


def _tensors(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return main parameters and their state, in the same order at owner and holder."""
    found: list[torch.Tensor] = []
    for each in _parameters(inner):
        state = stored_state(inner, each)
        found += [each, *(state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor))]
    return found


def _like(value: Any, known: torch.Tensor, parameter: torch.Tensor) -> Any:
    """Return memory for a value of the state of `parameter`, shaped as `value` is for `known`."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.new_zeros(parameter.shape if value.shape == known.shape else value.shape)


def with_copies(stock: Any, made: list[Any]) -> Any:
    """Return a subclass of Megatron's DistributedOptimizer that steps a copy of another rank's shard after `hold_copy`.

    All its instances are appended to `made`.
    """

    class FaultTolerantDistributedOptimizer(stock):  # type: ignore[misc]
        """Distributed optimizer with a copy of another rank's shard."""

        def __init__(self, optimizer: Any, *given: Any, **keywords: Any) -> None:
            groups = [] if optimizer is None else optimizer.param_groups
            self._made_with = MadeWith([dict(each, params=list(each["params"])) for each in groups], given, keywords)
            self._copy: ShardCopy | None = None
            self._instance: OptimizerInstance | None = None
            super().__init__(optimizer, *given, **keywords)
            made.append(self)

        def hold_copy(self, layout: JobLayout, *, fill: bool = True) -> None:
            """Create the copy; `fill` it from the owner's state (then collective over the group).

            Raises ValueError if no other cell could hold copies, or has the shards of another instance.
            """
            if self.is_stub_optimizer or self._copy is not None or self._instance is not None:
                return
            if getattr(self.ddp_config, "num_distributed_optimizer_instances", 1) > 1:
                self._instance = OptimizerInstance(self, layout)
            else:
                self._copy = ShardCopy(self, stock, self._made_with, layout, fill=fill)

        @property
        def shard_group(self) -> FaultTolerantGroup:
            """Group of the ranks with shards, which knows the holders of copies."""
            group: FaultTolerantGroup = self.data_parallel_group
            return group

        def shard_parameters(self, *, own: bool) -> list[torch.Tensor]:
            """Return the main parameters of this rank's own shard, or of the copied one; with several instances, the
            same ones.
            """
            if self._copy is None:
                return _parameters(self.optimizer)
            return self._copy.parameters(own=own)

        def sharded_state_alone(self, *given: Any, **keywords: Any) -> Any:
            """Return Megatron's sharded state, without the copy."""
            return super().sharded_state_dict(*given, **keywords)

        def sharded_state_dict(self, *given: Any, **keywords: Any) -> Any:
            if self._copy is None:
                if self._instance is None:
                    return self.sharded_state_alone(*given, **keywords)
                refuse_gathering(self.shard_group, keywords)
                with self._instance.saving():
                    return self.sharded_state_alone(*given, **keywords)
            own, dead = self._copy.sharded_states(*given, **keywords)
            return own if dead is None else {**own, "of_a_dead_rank": dead}

        def save_parameter_state(self, filename: str) -> None:
            if self._copy is not None or self._instance is not None:
                refuse_gathering(self.shard_group, {}, "--ckpt-format torch")
            super().save_parameter_state(filename)

        def load_state_dict(self, state_dict: Any) -> None:
            if self._copy is not None:
                raise RuntimeError(
                    "--adaptra-reroute failures: a checkpoint has been loaded into the distributed optimizer after its "
                    "first iteration, and the copies of its shards would miss it; load it before, or drop the flag"
                )
            super().load_state_dict(state_dict)

        def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
            if (copy := self._copy) is not None:
                # Looked up when the sum is made, which may be again after the owner has died.
                self.get_grad_stats_parallel_group().behalves.append(
                    lambda total: total.add_(copy.squares()) if copy.stands_in else total
                )
            grads: list[torch.Tensor] = super().get_main_grads_for_grad_norm()
            return grads

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            if self._copy is not None:
                self._copy.other.zero_grad(set_to_none)

        def _copy_model_grads_to_main_grads(self) -> None:
            super()._copy_model_grads_to_main_grads()
            if self._copy is not None:
                self._copy.other._copy_model_grads_to_main_grads()

        def _copy_main_params_to_model_params(self) -> None:
            super()._copy_main_params_to_model_params()
            if self._copy is not None:
                self._copy.other._copy_main_params_to_model_params()

        def _copy_model_params_to_main_params(self, *given: Any, **keywords: Any) -> None:
            super()._copy_model_params_to_main_params(*given, **keywords)
            if self._copy is not None:
                self._copy.other._copy_model_params_to_main_params(*given, **keywords)

    return FaultTolerantDistributedOptimizer
