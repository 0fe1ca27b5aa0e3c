# SPDX-License-Identifier: Apache-2.0
"""Define the command line of the training script: Megatron's argument names, ours, and those of the emulated
cluster.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from testing.faults.deaths import FORM as FORM_OF_DEATH
from testing.faults.holds import FORM as FORM_OF_HOLD
from testing.faults.late_operations import FORM as FORM_OF_LATENESS
from testing.faults.slow_cells import FORM


class TrainingArgumentsError(ValueError):
    """Arguments that contradict each other or the number of processes; the message names both and the remedy."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `scripts/train_gpt.py`."""
    parser = argparse.ArgumentParser(description="Train a GPT with Megatron-core.", allow_abbrev=False)
    _add_parallelism(parser.add_argument_group("parallelism"))
    _add_network(parser.add_argument_group("network"))
    _add_training(parser.add_argument_group("training"))
    _add_data(parser.add_argument_group("data and checkpoints"))
    _add_emulation(parser.add_argument_group("emulated cluster"))
    from adaptra_megatron.config import add_adaptra_arguments

    add_adaptra_arguments(parser)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv` (default: the process's own). A wrong command line exits with status 2 and usage on stderr."""
    return build_parser().parse_args(argv)


def _add_parallelism(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--context-parallel-size", type=int, default=1)
    group.add_argument("--expert-model-parallel-size", type=int, default=1)
    group.add_argument("--overlap-moe-expert-parallel-comm", action="store_true")
    group.add_argument("--delay-wgrad-compute", action="store_true")
    chunks = group.add_mutually_exclusive_group()
    chunks.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, default=None)
    chunks.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=None)
    group.add_argument("--microbatch-group-size-per-virtual-pipeline-stage", type=int, default=None)
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--no-overlap-p2p-communication", action="store_false", dest="overlap_p2p_comm")
    group.add_argument("--variable-seq-lengths", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--num-distributed-optimizer-instances", type=int, default=1)
    group.add_argument("--overlap-grad-reduce", action="store_true")
    group.add_argument("--ddp-bucket-size", type=int, default=None)
    group.add_argument("--ddp-average-in-collective", action="store_true")
    group.add_argument("--no-align-grad-reduce", action="store_false", dest="align_grad_reduce")
    group.add_argument("--overlap-param-gather", action="store_true")
    group.add_argument("--align-param-gather", action="store_true")
    group.add_argument("--distributed-backend", choices=["nccl", "gloo"], default="nccl")
    group.add_argument("--distributed-timeout-minutes", type=float, default=10.0)


def _add_network(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-layers", type=int, default=4)
    group.add_argument("--hidden-size", type=int, default=32)
    group.add_argument("--ffn-hidden-size", type=int, default=None)
    group.add_argument("--num-attention-heads", type=int, default=4)
    group.add_argument("--seq-length", type=int, default=16)
    group.add_argument("--max-position-embeddings", type=int, default=None, help="default: --seq-length")
    group.add_argument("--position-embedding-type", choices=["learned_absolute", "rope"], default="learned_absolute")
    group.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    group.add_argument("--attention-dropout", type=float, default=0.0)
    group.add_argument("--hidden-dropout", type=float, default=0.0)
    group.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    group.add_argument("--num-experts", type=int, default=None)
    group.add_argument("--moe-token-dispatcher-type", choices=["alltoall", "flex"], default="alltoall")
    group.add_argument("--moe-router-topk", type=int, default=2)
    group.add_argument("--moe-router-score-function", choices=["softmax", "sigmoid"], default="softmax")
    group.add_argument("--moe-router-enable-expert-bias", action="store_true")
    group.add_argument("--moe-shared-expert-intermediate-size", type=int, default=None)
    group.add_argument("--mtp-num-layers", type=int, default=None)
    group.add_argument("--cuda-graph-impl", choices=["none", "transformer_engine"], default="none")
    group.add_argument("--cuda-graph-scope", nargs="+", default=["attn"])
    group.add_argument("--cuda-graph-warmup-steps", type=int, default=3)
    group.add_argument("--fine-grained-activation-offloading", action="store_true")
    group.add_argument("--offload-modules", nargs="*", default=["core_attn"])
    group.add_argument("--recompute-granularity", choices=["full", "selective"], default=None)
    group.add_argument("--recompute-method", choices=["uniform", "block"], default=None)
    group.add_argument("--recompute-num-layers", type=int, default=None)
    group.add_argument("--recompute-modules", nargs="*", default=None)


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--micro-batch-size", type=int, default=1)
    group.add_argument("--global-batch-size", type=int, default=None, help="default: one micro-batch per stage")
    group.add_argument("--train-iters", type=int, required=True)
    group.add_argument("--eval-iters", type=int, default=0)
    group.add_argument("--eval-interval", type=int, default=1000)
    group.add_argument("--log-interval", type=int, default=1)
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--lr-decay-style", choices=["constant", "linear", "cosine"], default="constant")
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--calculate-per-token-loss", action="store_true")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--use-precision-aware-optimizer", action="store_true")
    group.add_argument("--fp8-recipe", default=None, help="by which the optimizer is chosen; the model has no FP8")
    group.add_argument("--main-params-dtype", choices=["fp32", "fp16"], default="fp32")
    for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
        group.add_argument(name, choices=["fp32", "fp16", "bf16", "fp8"], default="fp32")
    group.add_argument("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion")


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data-path", default=None, help="prefix of a Megatron indexed dataset of bytes")
    group.add_argument("--data-cache-path", default=None)
    group.add_argument("--split", default="90,10,0")
    group.add_argument("--mock-data", action="store_true", help="a few random sequences to memorise")
    group.add_argument(
        "--mock-data-padded",
        action="store_true",
        help="they end early, each at a token of its own; with --variable-seq-lengths they are cut there",
    )
    group.add_argument("--save", default=None, help="directory of the checkpoints to write")
    group.add_argument("--load", default=None, help="directory of the checkpoints to go on from")
    group.add_argument("--save-interval", type=int, default=None, help="iterations; default: at the end only")
    group.add_argument("--async-save", action="store_true", help="write checkpoints in the background")
    group.add_argument("--use-persistent-ckpt-worker", action="store_true", help="by one process, else by a fork each")


def _add_emulation(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--emulate-cpu", action="store_true", help="run Megatron on the CPU, over gloo")
    group.add_argument(
        "--emulate-fused-weight-gradient",
        action="store_true",
        help="accumulate weight gradients by a stand-in of apex's kernels",
    )
    group.add_argument(
        "--emulate-compute-ms",
        default=None,
        metavar="F,B,W[;F,B,W...]",
        help="milliseconds that forward, input gradient and weight gradient last: one triple, or one per stage",
    )
    group.add_argument(
        "--emulate-exact-times",
        action="store_true",
        help="report the times of --emulate-compute-ms, or without it CPU times, to the planner, not measured ones",
    )
    group.add_argument(
        "--emulate-prompt-planner",
        action="store_true",
        help="begin no iteration before the planner has decided on what was measured",
    )
    group.add_argument(
        "--emulate-fault-plan",
        default=None,
        metavar="DIR",
        help="the directory of a fault campaign (campaigns.soak), whose driver runs along with the job",
    )
    group.add_argument(
        "--emulate-path-flaps",
        default=None,
        metavar="SEED",
        help="change the preferred path of every link after every few messages, at random",
    )
    group.add_argument(
        "--emulate-slow-link",
        action="append",
        default=[],
        metavar="A-B:latency_ms=L[,bandwidth_mbps=R][,occupancy_ms=O][,jitter_ms=J][,exponential_ms=E][,from=I]"
        "[,until=J][,seed=S][,path=device|host|both]",
        help="slow the link between two stages, both ways (A-B) or one way (A>B), by default its device path alone; "
        "may be repeated",
    )
    group.add_argument(
        "--emulate-slow-cell",
        action="append",
        default=[],
        metavar=FORM,
        help="multiply the emulated compute times of one stage of one data-parallel replica; may be repeated",
    )
    group.add_argument(
        "--emulate-death",
        action="append",
        default=[],
        metavar=FORM_OF_DEATH,
        help="kill a rank as it begins an action of an iteration (both from 0), or some time after the iteration has "
        "begun, after its first reduction of gradients has, after another rank's operation has that is late on "
        "purpose, or after its process that was started again START times has come to a point of an admission; may be "
        "repeated",
    )
    group.add_argument(
        "--emulate-late",
        action="append",
        default=[],
        metavar=FORM_OF_LATENESS,
        help="have a random share of collectives, of requests to the job's store and of the package's threads begin "
        "late, or of messages arrive late; or one reduction of a rank, in a call of Megatron's schedules or outside of "
        "them, as late as does most harm; or a process that was started again stand ready once others wait for it; "
        "needs --adaptra-reroute failures and --dump-state; may be repeated",
    )
    group.add_argument(
        "--emulate-wait-for-arrivals",
        action="append",
        type=int,
        default=[],
        metavar="ITERATION",
        help="begin an iteration (from 0) once all ranks that have died stand ready again; may be repeated",
    )
    group.add_argument(
        "--emulate-death-at-save",
        action="append",
        default=[],
        metavar="RANK:ITERATION:{scheduling,finalizing}",
        help="kill a rank as it schedules or finalizes the checkpoint of an iteration, with --async-save",
    )
    group.add_argument(
        "--emulate-write-ms", type=float, default=0.0, help="by which writers of --async-save begin late"
    )
    group.add_argument(
        "--emulate-lasting-write",
        type=int,
        metavar="ITERATION",
        help="writers of the checkpoint of this iteration never begin: it is under way until it is given up",
    )
    group.add_argument(
        "--emulate-exact-sums",
        action="store_true",
        help="round each micro-batch's gradients so that their sums are the same to the bit in any order",
    )
    group.add_argument(
        "--emulate-hold",
        action="append",
        default=[],
        metavar=FORM_OF_HOLD,
        help="begin an iteration (from 0) once a file exists; may be repeated",
    )
    group.add_argument(
        "--emulate-link-story",
        default=None,
        metavar="FILE",
        help="what happens to links, and pauses (testing.faults.network.link_story)",
    )
    group.add_argument(
        "--dump-state", default=None, metavar="DIR", help="write losses, parameters and optimizer state of every rank"
    )


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Complete the arguments from the number of processes, and refuse invalid ones.

    Sets `data_parallel_size`, `global_batch_size`, `num_micro_batches`, `virtual_pipeline_model_parallel_size`,
    `sequences_vary` and `max_position_embeddings`. Idempotent. Raises TrainingArgumentsError with the rule, the numbers
    and the remedy.
    """
    layout = (args.tensor_model_parallel_size, args.context_parallel_size, args.pipeline_model_parallel_size)
    model_parallel = math.prod(layout)
    if world_size % model_parallel:
        raise TrainingArgumentsError(
            f"{world_size} processes cannot hold tensor x context x pipeline = {' x '.join(map(str, layout))}: start a "
            f"multiple of {model_parallel}"
        )
    parts = 2 * args.context_parallel_size
    if args.context_parallel_size > 1 and args.seq_length % parts:
        raise TrainingArgumentsError(
            f"--seq-length {args.seq_length} is no multiple of 2 x --context-parallel-size = {parts}"
        )
    args.data_parallel_size = world_size // model_parallel
    args.virtual_pipeline_model_parallel_size = _virtual_size(args)
    per_micro_batch = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = per_micro_batch * args.pipeline_model_parallel_size
    if args.global_batch_size % per_micro_batch:
        raise TrainingArgumentsError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size x data parallel size "
            f"= {args.micro_batch_size} x {args.data_parallel_size}"
        )
    args.num_micro_batches = args.global_batch_size // per_micro_batch
    args.sequences_vary = args.mock_data_padded and args.variable_seq_lengths
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.seq_length > args.max_position_embeddings:
        raise TrainingArgumentsError(
            f"--seq-length {args.seq_length} is more than --max-position-embeddings {args.max_position_embeddings}"
        )
    if args.mock_data == (args.data_path is not None):
        raise TrainingArgumentsError("give exactly one of --data-path and --mock-data")
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        raise TrainingArgumentsError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce"
        )
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        raise TrainingArgumentsError("--sequence-parallel needs --tensor-model-parallel-size of at least 2")


def _virtual_size(args: argparse.Namespace) -> int | None:
    """Return the number of chunks per stage; None for a schedule that is not interleaved."""
    stages = args.pipeline_model_parallel_size
    if args.num_virtual_stages_per_pipeline_rank is not None:
        chunks: int = args.num_virtual_stages_per_pipeline_rank
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        chunks, rest = divmod(args.num_layers, stages * args.num_layers_per_virtual_pipeline_stage)
        if rest:
            raise TrainingArgumentsError(
                f"--num-layers {args.num_layers} is no multiple of stages x --num-layers-per-virtual-pipeline-stage "
                f"= {stages} x {args.num_layers_per_virtual_pipeline_stage}"
            )
    else:
        return None
    if args.num_layers % (stages * chunks):
        raise TrainingArgumentsError(
            f"--num-layers {args.num_layers} cannot be split evenly in stages x chunks = {stages} x {chunks}"
        )
    return chunks if chunks > 1 else None
