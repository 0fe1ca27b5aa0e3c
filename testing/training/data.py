# SPDX-License-Identifier: Apache-2.0
"""Provide batches for training and evaluation, reproducible on every rank."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from adaptra_megatron.routable_data import RoutableMicroBatches
from testing.training.corpus import VOCABULARY, ByteTokenizer

Batch = dict[str, torch.Tensor]


class DataError(ValueError):
    """The data cannot be split as asked; the message names the part and the remedy."""


class Sequences(Protocol):
    """Samples by number: int64 `tokens`, `labels`, `position_ids` and float32 `loss_mask`, each [seq_length]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


class MemorisedSequences:
    """A few random sequences, repeated: learnt within a few iterations, without any file."""

    def __init__(self, *, seq_length: int, samples: int, seed: int, distinct: int = 32, padded: bool = False) -> None:
        """`padded`: each sequence ends early, at its own token; the rest has no loss."""
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(0, VOCABULARY, (distinct, seq_length + 1), generator=generator)
        self._samples = samples
        lengths = torch.full((distinct,), seq_length)
        if padded:
            lengths = torch.randint(1, seq_length + 1, (distinct,), generator=generator)
        self._loss_masks = (torch.arange(seq_length) < lengths[:, None]).float()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Batch:
        number = index % len(self._tokens)
        text = self._tokens[number]
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "position_ids": torch.arange(len(text) - 1),
            "loss_mask": self._loss_masks[number],
        }


def build_datasets(args: argparse.Namespace) -> tuple[Sequences, Sequences]:
    """Return training and validation samples, enough for the whole run. Collective: every rank must call it.

    Raises DataError if a part of --split has no document, or the validation part is missing although evaluation is on.
    """
    training_samples = args.train_iters * args.global_batch_size
    evaluations = args.train_iters // args.eval_interval + 1 if args.eval_iters else 0
    validation_samples = evaluations * args.eval_iters * args.global_batch_size
    if args.mock_data:
        alike = {"seq_length": args.seq_length, "seed": args.seed, "padded": args.mock_data_padded}
        return (
            MemorisedSequences(samples=training_samples, **alike),
            MemorisedSequences(samples=validation_samples, **alike),
        )
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([args.data_path], None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    _check_split(args.data_path, args.split, config.split_matrix)
    sizes = [training_samples, validation_samples, 0]
    training, validation, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    if validation is None and args.eval_iters:
        raise DataError(f"--split {args.split} leaves no validation data for --eval-iters {args.eval_iters}")
    return training, validation


def _check_split(prefix: str, split: str, shares: Sequence[tuple[float, float] | None]) -> None:
    """Raise DataError for a part of --split without a document, over which Megatron 0.16.1 loops for ever."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = len(IndexedDataset(prefix).document_indices) - 1
    for part, share in zip(("training", "validation", "test"), shares, strict=True):
        if share is not None and round(share[0] * documents) >= round(share[1] * documents):
            raise DataError(
                f"--split {split} leaves the {part} part without any of the {documents} documents of {prefix}: give it "
                "more, or 0"
            )


def micro_batches(
    sequences: Sequences,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    consumed_samples: int,
    device: Any,
    cut: bool = False,
) -> Iterator[Batch]:
    """Iterate over micro-batches of this data-parallel rank from sample `consumed_samples` on, in Megatron's order.

    Each tensor is [micro_batch_size, seq_length]; with `cut` no longer than the part of the longest sequence that has a
    loss. Ends when no full micro-batch for all data-parallel ranks is left. The iterator also returns the micro-batches
    of other data-parallel ranks and, with `cut`, their lengths.
    """
    step = micro_batch_size * data_parallel_size

    def micro_batch(replica: int, number: int) -> Batch:
        first = consumed_samples + number * step + replica * micro_batch_size
        samples = [sequences[index] for index in range(first, first + micro_batch_size)]
        length = max(int(sample["loss_mask"].sum()) for sample in samples) if cut else None
        return {
            name: torch.stack([sample[name][:length] for sample in samples]).to(device)
            for name in ("tokens", "labels", "position_ids", "loss_mask")
        }

    def tokens(replica: int, number: int) -> float:
        return micro_batch(replica, number)["tokens"].numel()

    own = (micro_batch(data_parallel_rank, number) for number in range((len(sequences) - consumed_samples) // step))
    return RoutableMicroBatches(own, micro_batch, tokens if cut else None)
