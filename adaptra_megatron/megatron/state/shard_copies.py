# SPDX-License-Identifier: Apache-2.0
"""Megatron's distributed optimizer with a copy of each shard of its state at a rank of another cell.

The copy is stepped, not sent: its rank gets the reduced gradients of the shard as the owner does (one more shard of
gradients, 1/D of the buffer, at the end of each reduction) and takes the same steps with the same numbers. So copy and
shard are equal to the bit, and a death at any moment finds a whole copy. It costs the memory of one more shard (12
bytes per parameter over D, with Adam and 16-bit parameters) and the time of its step.

Where the owner has died, the holder of the copy adds the shard's part to gradient norms, has its parameters gathered,
and writes it into checkpoints.

Of several instances of the optimizer each has all shards, so none is copied: see `optimizer_instances`.
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
    """Part that one optimizer of an instance shares with those of the others."""

    def __init__(self, optimizer: Any, layout: JobLayout) -> None:
        """Raises ValueError where instances are not made of whole replicas."""
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
        """Ranks that have this one's shard, by instance."""
        assert self._group.alike is not None
        return list(self._group.alike[self._rank])

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Number instances meanwhile as if those that live were all: the first writes what a checkpoint has."""
        before = self._optimizer.distributed_optimizer_instance_id
        live = [rank for rank in self._same if rank in self._group.members]
        self._optimizer.distributed_optimizer_instance_id = live.index(self._rank)
        try:
            yield
        finally:
            self._optimizer.distributed_optimizer_instance_id = before


def holders_of(layout: JobLayout, ranks: Sequence[int]) -> list[int]:
    """The place, in a group of `ranks`, of each member's holder: of another cell, and on another host where it can be.

    Raises ValueError where there is no other cell.
    """

    def apart(shift: int) -> tuple[bool, int]:
        workers = [layout.workers[rank] for rank in ranks]
        pairs = [(each, workers[(place + shift) % len(ranks)]) for place, each in enumerate(workers)]
        return all(a.cell != b.cell for a, b in pairs), sum(a.host != b.host for a, b in pairs)

    shift = max(range(1, len(ranks)), key=apart, default=0)
    if not shift or not apart(shift)[0]:
        raise ValueError(f"ranks {list(ranks)} share shards, and no other replica could hold copies of them")
    return [(place + shift) % len(ranks) for place in range(len(ranks))]


_WRITTEN_BY_EACH = ("dp_reshardable", "fully_sharded_bucket_space", "fully_sharded_model_space")
"""Formats in which each rank writes its own shard (DistributedOptimizer.sharded_state_dict, of all releases)."""


class MadeWith(NamedTuple):
    """Arguments that a distributed optimizer was made with."""

    groups: list[dict[str, Any]]
    """Groups of the model's parameters; the optimizer has those of its shard instead."""
    given: tuple[Any, ...]
    keywords: dict[str, Any]


class ShardCopy:
    """Copy of another rank's shard in one optimizer: that rank's optimizer, whose parameters this rank's steps."""

    def __init__(self, own: Any, stock: type, made_with: MadeWith, layout: JobLayout, *, fill: bool) -> None:
        """Collective over the group, if it is to `fill` the copy. `stock`: Megatron's class. Raises ValueError as
        `holders_of`."""
        self._own = own
        self._group: FaultTolerantGroup = own.data_parallel_group
        self._group.holders = holders_of(layout, self._group.ranks)
        self._place = self._group.holders.index(self._group.place)
        """The owner's, in the group."""
        inner = object.__new__(type(own.optimizer))
        inner.__dict__.update(own.optimizer.__dict__)
        inner.state, inner.param_groups = defaultdict(dict), made_with.groups
        parameters = [each for group in made_with.groups for each in group["params"] if hasattr(each, "main_param")]
        main = [each.main_param for each in parameters]
        with self._group.seen_as(self._place):
            self.other: Any = stock(inner, *made_with.given, **made_with.keywords)
        for parameter, kept in zip(parameters, main, strict=True):
            parameter.main_param = kept
        if fill:
            self._fill()
        self._shared = {each: getattr(each, "shared", False) for each in _parameters(inner)}
        self._count(False)
        for group, more in zip(own.optimizer.param_groups, inner.param_groups, strict=True):
            group["params"] = [*group["params"], *more["params"]]
        own.optimizer.state.update(inner.state)

    @property
    def stands_in(self) -> bool:
        """Return whether the owner has died."""
        return self._place in self._group.stood_in_for

    def parameters(self, *, own: bool) -> list[torch.Tensor]:
        """Main parameters of this rank's own shard, or of the other."""
        others = _parameters(self.other.optimizer)
        known = set(map(id, others))
        return [each for each in _parameters(self._own.optimizer) if id(each) not in known] if own else others

    def squares(self) -> torch.Tensor:
        """Return the sum of squares of those gradients that the owner would add to the norm, [1]."""
        self.other.tp_group = getattr(self._own, "tp_group", None)
        self._count(True)
        grads = self.other.get_main_grads_for_grad_norm()
        self._count(False)
        none = torch.zeros(1, device=self._device)
        return sum((grad.float().square().sum() for grad in grads), none)

    def sharded_states(self, *given: Any, **keywords: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return what a checkpoint has of this rank's own shard, as if none had died, and of a dead owner's. Raises
        UnsupportedFeatureError where members are dead and the format gathers shards at one rank."""
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
        """Have Megatron count the copy in norms, or leave it out as it does parameters that two stages share."""
        for each, shared in self._shared.items():
            each.shared = shared or not counted  # type: ignore[attr-defined]

    def _fill(self) -> None:
        """Get from the owner what it may have loaded, before any member can be lost."""
        own, inner = self._own.optimizer, self.other.optimizer
        if own.state:
            known = next(iter(own.state))
            for each in _parameters(inner):
                inner.state[each] = {name: _like(value, known, each) for name, value in own.state[known].items()}
        given, received = _tensors(own), _tensors(inner)
        # Where gradients are: torch's Adam counts its steps in tensors on the CPU.
        none = torch.empty(0, device=self._device)
        flat = torch.cat([none, *(each.reshape(-1).to(none) for each in given)])
        found = flat.new_empty(sum(each.numel() for each in received))
        self._group.hand_on(flat, found).wait()
        with torch.no_grad():
            end = 0
            for each in received:
                start, end = end, end + each.numel()
                each.copy_(found[start:end].view_as(each))


def refuse_gathering(group: FaultTolerantGroup, keywords: Mapping[str, Any], what: str = "") -> None:
    """Raise UnsupportedFeatureError where members are dead and `what`, or the format in `keywords` (of Megatron's
    sharded_state_dict), gathers shards at one rank."""
    metadata = keywords.get("metadata") or {}
    kind = keywords.get("sharding_type") or metadata.get("distrib_optim_sharding_type", "fully_sharded_model_space")
    if group.members != group.ranks and (what or kind not in _WRITTEN_BY_EACH):
        what = what or f"the format {kind} of the distributed optimizer's state"
        raise UnsupportedFeatureError(
            f"ranks are dead, and {what} gathers all shards at one rank, so this checkpoint cannot be written: go "
            "on from the one before, and use --ckpt-format torch_dist without --dist-ckpt-optim-fully-reshardable"
        )


def _parameters(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in inner.param_groups for each in group["params"]]


def _tensors(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Main parameters and their state, in the same order at owner and holder."""
    found: list[torch.Tensor] = []
    for each in _parameters(inner):
        state = inner.state.get(each, {})
        found += [each, *(state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor))]
    return found


def _like(value: Any, known: torch.Tensor, parameter: torch.Tensor) -> Any:
    """A place for a value of the state of `parameter`, as `value` is for that of `known`."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.new_zeros(parameter.shape if value.shape == known.shape else value.shape)


def with_copies(stock: Any, made: list[Any]) -> Any:
    """Megatron's DistributedOptimizer, which steps a copy of another rank's shard once `hold_copy` has been called.
    All that are made are put into `made`."""

    class OutlivingDistributedOptimizer(stock):  # type: ignore[misc]
        """One of them."""

        def __init__(self, optimizer: Any, *given: Any, **keywords: Any) -> None:
            groups = [] if optimizer is None else optimizer.param_groups
            self._made_with = MadeWith([dict(each, params=list(each["params"])) for each in groups], given, keywords)
            self._copy: ShardCopy | None = None
            self._instance: OptimizerInstance | None = None
            super().__init__(optimizer, *given, **keywords)
            made.append(self)

        def hold_copy(self, layout: JobLayout, *, fill: bool = True) -> None:
            """Collective over the group, if it is to `fill` the copy. Raises ValueError where no other cell could hold
            copies, or has the shards of another instance."""
            if self.is_stub_optimizer or self._copy is not None or self._instance is not None:
                return
            if getattr(self.ddp_config, "num_distributed_optimizer_instances", 1) > 1:
                self._instance = OptimizerInstance(self, layout)
            else:
                self._copy = ShardCopy(self, stock, self._made_with, layout, fill=fill)

        @property
        def shard_group(self) -> FaultTolerantGroup:
            """Ranks that have shards, and know the holders of copies."""
            group: FaultTolerantGroup = self.data_parallel_group
            return group

        def shard_parameters(self, *, own: bool) -> list[torch.Tensor]:
            """Main parameters of this rank's own shard, or of that which it has a copy of: with several instances, the
            same."""
            if self._copy is None:
                return _parameters(self.optimizer)
            return self._copy.parameters(own=own)

        def sharded_state_alone(self, *given: Any, **keywords: Any) -> Any:
            """Megatron's."""
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
                    "first iteration, and the copies of its shards would not know; load it before, or drop the flag"
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

    return OutlivingDistributedOptimizer
