# SPDX-License-Identifier: Apache-2.0
"""Run the training job of `scripts/train_gpt.py`: a GPT on megatron.core, in Megatron's own steps.

`train()` may be called repeatedly in one process (on all ranks alike): every call builds everything anew.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.utils import get_batch_on_this_cp_rank

from testing.megatron.captured_graphs import emulated_graphs
from testing.megatron.fused_adam import emulated_fused_adam
from testing.results import TrainingResult, model_tensors, optimizer_tensors, save_result
from testing.stock import trace_stock
from testing.training.checkpointing import check_can_save, load_checkpoint, save_checkpoint
from testing.training.conditions import emulate_conditions, late_rank
from testing.training.data import Batch, build_datasets, micro_batches
from testing.training.exact_sums import make_sums_exact
from testing.training.model import build_config, build_model, build_optimizer, captured_layers
from testing.training.process_groups import join_job, seed_everything, set_up_groups
from testing.training.training_arguments import check_arguments

if TYPE_CHECKING:
    from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
    from adaptra_megatron.engine.runtime import AdaptraRuntime
    from testing.faults.late_operations import LateRank

logger = logging.getLogger("adaptra_megatron.training")  # its lines are those of Megatron's own training


def train(args: argparse.Namespace) -> TrainingResult:
    """Train according to `args` and return this rank's result. Collective: all processes of the job must call it.

    If a peer fails, the collective or message that misses it raises within --distributed-timeout-minutes. Raises
    TrainingArgumentsError if arguments contradict each other or the number of processes.
    """
    applied = None
    with contextlib.ExitStack() as stack:
        if (late := late_rank(args)) is not None:
            stack.enter_context(late)
        groups = _live_groups(args)
        world_size = join_job(args)
        check_arguments(args, world_size)
        set_up_groups(args)
        if args.cuda_graph_impl != "none" and args.emulate_cpu:
            stack.enter_context(emulated_graphs(args.num_micro_batches))
        if args.use_precision_aware_optimizer and args.emulate_cpu:
            stack.enter_context(emulated_fused_adam())
        conditions = stack.enter_context(emulate_conditions(args, world_size, late))
        if args.adaptra:
            from adaptra_megatron.patches import enable

            from adaptra_megatron.config import config_from_arguments

            applied = enable(config_from_arguments(args), decorate=conditions.decorate, groups=groups)
            stack.callback(applied.undo)
        elif args.adaptra_trace_dir is not None:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            stack.enter_context(trace_stock(schedules, args.adaptra_trace_dir, rank=dist.get_rank(), stage=stage))
        runtime = None if applied is None else applied.runtime
        trainer = Trainer(args, conditions.watchers, runtime, late)
        trainer.run()
        conditions.report(trainer.result)
        if runtime is not None:
            trainer.result.adaptra = runtime.summary()
    if args.dump_state:
        save_result(trainer.result, args.dump_state, rank=dist.get_rank(), world_size=world_size)
    return trainer.result


def _live_groups(args: argparse.Namespace) -> FaultTolerantGroups | None:
    """Create process groups that survive failures of their members, if `args` ask for that; call it before any
    exists.
    """
    if not args.adaptra:
        return None
    from adaptra_megatron.config import config_from_arguments
    from adaptra_megatron.elastic.process_group_manager import live_groups

    return live_groups(config_from_arguments(args))


class Trainer:
    """Model, optimizer, data and loop of one training."""

    def __init__(
        self,
        args: argparse.Namespace,
        watchers: Sequence[Callable[[int], None]] = (),
        runtime: AdaptraRuntime | None = None,
        late: LateRank | None = None,
    ) -> None:
        """`watchers`: called with the number of each iteration (from 0) when it begins. `runtime`: if given, the plan
        of each iteration is recorded. `late`: gets each call of Megatron's schedules.
        """
        self.args = args
        self._watchers, self._runtime, self._late = watchers, runtime, late
        if args.save:
            check_can_save()
        self._saves = AsyncCallsQueue(persistent=args.use_persistent_ckpt_worker) if args.async_save else None
        self.result = TrainingResult()
        seed_everything(args.seed)
        self.config = build_config(args)
        self.model = build_model(args, self.config)
        if args.emulate_exact_sums:
            make_sums_exact(self.model, args.data_parallel_size)
        self.optimizer, self.scheduler = build_optimizer(args, self.config, self.model)
        self._graphs = captured_layers(args, self.config, self.model, self.optimizer)
        self.iteration = load_checkpoint(args, self.model, self.optimizer, self.scheduler) if args.load else 0
        self.training_data, self.validation_data = build_datasets(args)
        device = torch.cuda.current_device()
        length = args.seq_length
        self._attention_mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)

    def run(self) -> None:
        """Train up to --train-iters, with evaluations, checkpoints and logs; fill `result`."""
        args = self.args
        self._rejoin()
        iterators = self._iterators(self.training_data, self.iteration * args.global_batch_size)
        for chunk in self.model:
            chunk.train()
        first = self.iteration
        gather = self._without_gathers()
        while self.iteration < args.train_iters:
            if self._saves is not None:
                self._saves.maybe_finalize_async_calls()
            for watcher in self._watchers:
                watcher(self.iteration)
            started = time.perf_counter()
            # As Megatron's train(), which counts from its own first iteration.
            if self._graphs is not None and self.iteration - first == args.cuda_graph_warmup_steps:
                self._capture()
            grad_norm = self._train_step(iterators)
            if self.iteration == first:
                self._with_gathers(gather)
            if self._runtime is not None and (plan := self._runtime.last_plan()) is not None:
                self.result.plans.append(plan)
            self.iteration += 1
            self.result.grad_norms.append(grad_norm)
            self.result.iteration_seconds.append(time.perf_counter() - started)
            if self.iteration % args.log_interval == 0:
                self._log_iteration()
            if args.eval_iters and self.iteration % args.eval_interval == 0:
                self._evaluate()
            if args.save and (self._saves_regularly() or (self._save_is_due() and self.iteration < args.train_iters)):
                self._save()
        if self._runtime is not None:
            self._runtime.settle()
        self.result.grad_norms = [float(norm) for norm in self.result.grad_norms]
        with self._unhooked():
            dist.barrier()  # as Megatron's print_datetime, once training is done
            self.result.parameters = model_tensors(self.model)
        self.result.optimizer_state = optimizer_tensors(self.optimizer)
        if args.save and not self._saves_regularly():
            self._save()
        if self._saves is not None:
            self._saves.maybe_finalize_async_calls(blocking=True)
            self._saves.close()

    def _without_gathers(self) -> Any:
        """Have forwards gather no parameters, as Megatron's train() before its first iteration; return what does it."""
        gather = self.config.param_sync_func
        if self.args.overlap_param_gather:
            for chunk in self.model:
                chunk.disable_forward_pre_hook(param_sync=False)
            self.config.param_sync_func = None
        return gather

    def _with_gathers(self, gather: Any) -> None:
        """Have forwards gather parameters from now on, as after Megatron's first iteration."""
        if not self.args.overlap_param_gather:
            return
        for chunk in self.model:
            chunk.enable_forward_pre_hook()
        self.config.param_sync_func = gather
        if self._graphs is not None and not self.args.cuda_graph_warmup_steps:
            self._graphs.cuda_graph_set_manual_hooks()

    def _saves_regularly(self) -> bool:
        return bool(self.args.save_interval) and self.iteration % self.args.save_interval == 0

    def _save_is_due(self) -> bool:
        """Return whether a checkpoint has been given up, as ranks failed while it was written in the background."""
        if self._runtime is None or self.args.adaptra_reroute not in ("failures", "all"):
            return False
        from adaptra_megatron.engine.fault_tolerance import FaultTolerance

        return self._runtime.feature(FaultTolerance).saves.is_due

    def _capture(self) -> None:
        with self._unhooked(gathered=False) as hooked:
            self._graphs.create_cudagraphs()
        if hooked:
            self._graphs.cuda_graph_set_manual_hooks()

    def _rejoin(self) -> None:
        """Rejoin the job if this process replaces a failed rank."""
        if self._runtime is None or self.args.adaptra_reroute not in ("failures", "all"):
            return
        from adaptra_megatron.engine.fault_tolerance import FaultTolerance
        from adaptra_megatron.engine.rejoining import Training, settings_of

        feature = self._runtime.feature(FaultTolerance)
        feature.training = Training(
            self.model,
            self.optimizer,
            self.scheduler,
            lambda: {"iteration": self.iteration},
            settings_of(self.args),
        )
        if (progress := feature.rejoin()) is not None:
            self.iteration = progress["iteration"]

    def _train_step(self, iterators: Any) -> Any:
        """Run one iteration, as Megatron's train_step. Returns the norm of the gradient; float() may wait for it."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        entered_s = time.monotonic()
        losses = self._forward_backward(iterators, forward_only=False)
        self.result.forward_backward_s.append((entered_s, time.monotonic()))
        self._record_losses(losses)
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=self.args.global_batch_size)
        return grad_norm

    def _forward_backward(self, iterators: Any, *, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        args = self.args
        # Looked up each time, as Megatron's evaluate() does: what it returns may be replaced meanwhile.
        with contextlib.nullcontext() if self._late is None else self._late.call():
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
        self, iterator: Iterator[Batch], chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        group: dict[str, Any] = {}
        if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:  # from 0.19 on
            group = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
        batch = get_batch_on_this_cp_rank(next(iterator), **group)
        length = batch["tokens"].shape[1]
        future = self._attention_mask[..., :length, :length]
        compute = chunk.build_schedule_plan if return_schedule_plan else chunk
        output = compute(batch["tokens"], batch["position_ids"], future, labels=batch["labels"])

        def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            mask = batch["loss_mask"].view(-1).float()
            loss = torch.sum(losses.view(-1).float() * mask)
            tokens = mask.sum().to(torch.int)
            return loss, tokens, {"lm loss": torch.stack([loss.detach().clone(), tokens.float()])}

        return output, loss_function

    def _iterators(self, sequences: Any, consumed_samples: int) -> Any:
        """Return one iterator per chunk for the interleaved schedule, else one."""
        found = [
            micro_batches(
                sequences,
                micro_batch_size=self.args.micro_batch_size,
                data_parallel_rank=parallel_state.get_data_parallel_rank(),
                data_parallel_size=self.args.data_parallel_size,
                consumed_samples=consumed_samples,
                device=torch.cuda.current_device(),
                cut=self.args.sequences_vary,
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
        """Return the mean loss of a token over data- and context-parallel ranks. `sums`: [micro-batches, 2], loss and
        tokens.
        """
        total = sums.sum(dim=0)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return float(total[0] / total[1])

    @contextlib.contextmanager
    def _unhooked(self, *, gathered: bool = True) -> Iterator[Sequence[Any]]:
        """Have forwards gather no parameters within this context; return the chunks whose forwards did so.

        `gathered`: gather all first, with no gather pending, as Megatron does before it evaluates or saves.
        """
        # A training that is resumed at its end has no iteration after which forwards gather.
        hooked = [chunk for chunk in self.model if self.args.overlap_param_gather and _is_hooked(chunk)]
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=gathered)
        yield hooked
        for chunk in hooked:
            chunk.enable_forward_pre_hook()

    def _evaluate(self) -> None:
        args = self.args
        earlier = self.iteration // args.eval_interval - 1
        consumed = earlier * args.eval_iters * args.global_batch_size
        iterators = self._iterators(self.validation_data, consumed)
        for chunk in self.model:
            chunk.eval()
        reported: list[torch.Tensor] = []
        with torch.no_grad(), self._unhooked():
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
        def write() -> None:
            save_checkpoint(self.args, self.model, self.optimizer, self.scheduler, self.iteration, self._saves)

        with self._unhooked():
            write() if self._runtime is None else self._runtime.save(write)

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


def _is_hooked(chunk: Any) -> bool:
    return bool(chunk.remove_forward_pre_hook_handles)


def _speaks() -> bool:
    """Return whether this rank writes the log. As in Megatron's print_rank_last, that is the last rank, which has the
    loss.
    """
    return bool(dist.get_rank() == dist.get_world_size() - 1)
