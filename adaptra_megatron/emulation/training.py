# SPDX-License-Identifier: Apache-2.0
"""The training job of `scripts/train_gpt.py`: a GPT on megatron.core, in Megatron's own steps.

`train()` may be called again and again in one process (all ranks alike): every call builds everything anew.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

from adaptra_megatron.emulation.arguments import TrainingArgumentsError, check_arguments
from adaptra_megatron.emulation.checkpointing import check_can_save, load_checkpoint, save_checkpoint
from adaptra_megatron.emulation.compute import EmulatedCompute, parse_compute
from adaptra_megatron.emulation.data import Batch, build_datasets, micro_batches
from adaptra_megatron.emulation.link_faults import parse_link_fault
from adaptra_megatron.emulation.links import SlowLinks
from adaptra_megatron.emulation.model import build_config, build_model, build_optimizer
from adaptra_megatron.emulation.path_flaps import PathFlaps
from adaptra_megatron.emulation.process_groups import join_job, seed_everything, set_up_groups, stage_of_rank
from adaptra_megatron.emulation.results import TrainingResult, model_tensors, optimizer_tensors, save_result
from adaptra_megatron.telemetry.stock import trace_stock

if TYPE_CHECKING:
    from adaptra_megatron.emulation.soak_rank import SoakRank

logger = logging.getLogger("adaptra_megatron.emulation.training")


def train(args: argparse.Namespace) -> TrainingResult:
    """Train as `args` say and return this rank's result. Collective: all processes of the job must call it.

    When a peer fails, the collective or message that misses it raises within --distributed-timeout-minutes.

    Raises:
        TrainingArgumentsError: the arguments do not fit each other or the number of processes.
    """
    world_size = join_job(args)
    check_arguments(args, world_size)
    applied = None
    with contextlib.ExitStack() as stack:
        set_up_groups(args)
        compute = _emulate_compute(args, stack)
        links = _emulate_links(args, stack, world_size)
        soak = _soak(args, stack)
        flaps = _emulate_path_flaps(args, stack)
        if args.adaptra:
            from adaptra_megatron.config import config_from_arguments
            from adaptra_megatron.patches import enable

            decorate = None if compute is None else lambda computation, stage: compute.decorate(computation)
            applied = enable(config_from_arguments(args), decorate=decorate)
            stack.callback(applied.undo)
        elif args.adaptra_trace_dir is not None:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            stack.enter_context(trace_stock(schedules, args.adaptra_trace_dir, rank=dist.get_rank(), stage=stage))
        watchers = [watcher.set_iteration for watcher in (links, soak) if watcher is not None]
        trainer = Trainer(args, watchers)
        trainer.run()
        if links is not None:
            trainer.result.links_struck = {f"{a}>{b}": count for (a, b), count in links.struck_on_either.items()}
        if applied is not None and applied.runtime is not None:
            trainer.result.adaptra = applied.runtime.summary()
    if compute is not None:
        trainer.result.compute = asdict(compute.counts)
    if flaps is not None:
        trainer.result.path_flaps = flaps.flaps
    if args.dump_state:
        save_result(trainer.result, args.dump_state, rank=dist.get_rank(), world_size=world_size)
    return trainer.result


def _emulate_compute(args: argparse.Namespace, stack: contextlib.ExitStack) -> EmulatedCompute | None:
    if args.emulate_compute_ms is None:
        return None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = args.pipeline_model_parallel_size
    compute = parse_compute(args.emulate_compute_ms, stage=stage, stages=stages)
    # Also under --adaptra: where that leaves an iteration to stock, times are the same.
    stack.enter_context(compute.install_on_stock(schedules))
    return compute


def _emulate_path_flaps(args: argparse.Namespace, stack: contextlib.ExitStack) -> PathFlaps | None:
    if args.emulate_path_flaps is None:
        return None
    return stack.enter_context(PathFlaps(f"{args.emulate_path_flaps}:{dist.get_rank()}"))


def _soak(args: argparse.Namespace, stack: contextlib.ExitStack) -> SoakRank | None:
    if args.emulate_fault_plan is None:
        return None
    from adaptra_megatron.emulation.soak_rank import SoakRank

    stage = parallel_state.get_pipeline_model_parallel_rank()
    return stack.enter_context(SoakRank(Path(args.emulate_fault_plan), stage, args.pipeline_model_parallel_size))


def _emulate_links(args: argparse.Namespace, stack: contextlib.ExitStack, world_size: int) -> SlowLinks | None:
    if not args.emulate_slow_link:
        return None
    faults = [fault for text in args.emulate_slow_link for fault in parse_link_fault(text)]
    stages = args.pipeline_model_parallel_size
    unknown = [fault for fault in faults if max(fault.source, fault.target) >= stages]
    if unknown:
        raise TrainingArgumentsError(
            f"--emulate-slow-link names stage {max(unknown[0].source, unknown[0].target)}; there are stages 0 to "
            f"{stages - 1}"
        )
    stage = functools.partial(stage_of_rank, world_size=world_size, stages=stages)
    return stack.enter_context(SlowLinks(faults, stage))


class Trainer:
    """Model, optimizer, data and loop of one training."""

    def __init__(self, args: argparse.Namespace, watchers: Sequence[Callable[[int], None]] = ()) -> None:
        """`watchers` are told the number of each iteration (from 0) when it begins."""
        self.args = args
        self._watchers = watchers
        if args.save:
            check_can_save()
        self.result = TrainingResult()
        seed_everything(args.seed)
        self.config = build_config(args)
        self.model = build_model(args, self.config)
        self.optimizer, self.scheduler = build_optimizer(args, self.config, self.model)
        self.iteration = load_checkpoint(args, self.model, self.optimizer, self.scheduler) if args.load else 0
        self.training_data, self.validation_data = build_datasets(args)
        device = torch.cuda.current_device()
        length = args.seq_length
        self._attention_mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)

    def run(self) -> None:
        """Train up to --train-iters, evaluating, saving and logging on the way; fills `result`."""
        args = self.args
        iterators = self._iterators(self.training_data, self.iteration * args.global_batch_size)
        for chunk in self.model:
            chunk.train()
        while self.iteration < args.train_iters:
            for watcher in self._watchers:
                watcher(self.iteration)
            started = time.perf_counter()
            grad_norm = self._train_step(iterators)
            self.iteration += 1
            self.result.grad_norms.append(grad_norm)
            self.result.iteration_seconds.append(time.perf_counter() - started)
            if self.iteration % args.log_interval == 0:
                self._log_iteration()
            if args.eval_iters and self.iteration % args.eval_interval == 0:
                self._evaluate()
            if args.save and args.save_interval and self.iteration % args.save_interval == 0:
                self._save()
        with self._parameters_gathered():
            self.result.parameters = model_tensors(self.model)
        self.result.optimizer_state = optimizer_tensors(self.optimizer)
        if args.save and not (args.save_interval and self.iteration % args.save_interval == 0):
            self._save()

    def _train_step(self, iterators: Any) -> float:
        """One iteration, as Megatron's train_step. Returns the norm of the gradient."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        entered_s = time.monotonic()
        losses = self._forward_backward(iterators, forward_only=False)
        self.result.forward_backward_s.append((entered_s, time.monotonic()))
        self._record_losses(losses)
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=self.args.global_batch_size)
        return float(grad_norm)

    def _forward_backward(self, iterators: Any, *, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        args = self.args
        # Looked up each time, as Megatron's evaluate() does: what it returns may be replaced meanwhile.
        losses: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iterators,
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=args.num_micro_batches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=forward_only,
        )
        return losses

    def _forward_step(
        self, iterator: Iterator[Batch], chunk: DistributedDataParallel
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(iterator)
        output = chunk(batch["tokens"], batch["position_ids"], self._attention_mask, labels=batch["labels"])

        def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            mask = batch["loss_mask"].view(-1).float()
            loss = torch.sum(losses.view(-1).float() * mask)
            tokens = mask.sum().to(torch.int)
            return loss, tokens, {"lm loss": torch.stack([loss.detach().clone(), tokens.float()])}

        return output, loss_function

    def _iterators(self, sequences: Any, consumed_samples: int) -> Any:
        """One iterator per chunk where the schedule is interleaved, else one."""
        found = [
            micro_batches(
                sequences,
                micro_batch_size=self.args.micro_batch_size,
                data_parallel_rank=parallel_state.get_data_parallel_rank(),
                data_parallel_size=self.args.data_parallel_size,
                consumed_samples=consumed_samples,
                device=torch.cuda.current_device(),
            )
            for _ in self.model
        ]
        return found if len(found) > 1 else found[0]

    def _record_losses(self, losses: list[dict[str, torch.Tensor]]) -> None:
        if not losses:
            return
        sums = torch.stack([reported["lm loss"] for reported in losses]).double()
        self.result.micro_batch_losses.append((sums[:, 0] / sums[:, 1]).tolist())
        self.result.losses.append(self._mean_loss(sums))

    def _mean_loss(self, sums: torch.Tensor) -> float:
        """Mean loss of a token over the data-parallel group. `sums`: [micro-batches, 2], loss and tokens."""
        total = sums.sum(dim=0)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total[0] / total[1])

    @contextlib.contextmanager
    def _parameters_gathered(self) -> Iterator[None]:
        """Parameters complete and no gathering under way, as Megatron arranges before it evaluates or saves."""
        overlapped = self.args.overlap_param_gather
        if overlapped:
            for chunk in self.model:
                chunk.disable_forward_pre_hook()
        yield
        if overlapped:
            for chunk in self.model:
                chunk.enable_forward_pre_hook()

    def _evaluate(self) -> None:
        args = self.args
        earlier = self.iteration // args.eval_interval - 1
        consumed = earlier * args.eval_iters * args.global_batch_size
        iterators = self._iterators(self.validation_data, consumed)
        for chunk in self.model:
            chunk.eval()
        reported: list[torch.Tensor] = []
        with torch.no_grad(), self._parameters_gathered():
            for _ in range(args.eval_iters):
                losses = self._forward_backward(iterators, forward_only=True)
                reported += [loss["lm loss"] for loss in losses]
        for chunk in self.model:
            chunk.train()
        if reported:
            self.result.evaluation_losses.append(self._mean_loss(torch.stack(reported).double()))
            if _speaks():
                logger.info(
                    " validation loss at iteration %d | lm loss value: %.6E |",
                    self.iteration,
                    self.result.evaluation_losses[-1],
                )

    def _save(self) -> None:
        with self._parameters_gathered():
            save_checkpoint(self.args, self.model, self.optimizer, self.scheduler, self.iteration)

    def _log_iteration(self) -> None:
        if not _speaks():
            return
        recent = self.result.iteration_seconds[-self.args.log_interval :]
        logger.info(
            " iteration %8d/%8d | consumed samples: %12d | elapsed time per iteration (ms): %.1f | "
            "learning rate: %.6E | global batch size: %5d | lm loss: %.6E | grad norm: %.3f |",
            self.iteration,
            self.args.train_iters,
            self.iteration * self.args.global_batch_size,
            1000 * sum(recent) / len(recent),
            self.optimizer.param_groups[0]["lr"],
            self.args.global_batch_size,
            self.result.losses[-1],
            self.result.grad_norms[-1],
        )


def _speaks() -> bool:
    """Whether this rank writes the log: the last, as Megatron's print_rank_last, for it knows the loss."""
    return bool(dist.get_rank() == dist.get_world_size() - 1)
