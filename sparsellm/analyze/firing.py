"""Runs real text through a model and records every layer's pattern."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.analyze.summary import layer_statistics, token_extremes
from sparsellm.analyze.trace import Trace, index_dtype
from sparsellm.data import load_corpora, load_corpus, validation_batches
from sparsellm.data.corpus import Corpus
from sparsellm.ffn.module import SparseFFN
from sparsellm.ffn.reference import activation_function
from sparsellm.ffn.types import FFNStats
from sparsellm.recipe import Recipe
from sparsellm.runs.pretrained import Pretrained

SHOWN_TOKENS = 32  # of each end
MIN_OCCURRENCES = 8


def analyze(
    pretrained: Pretrained, corpus: Corpus, num_tokens: int, micro_batch_size: int
) -> tuple[dict[str, Any], list[Trace], NDArray[np.int64]]:
    """Statistics of all layers, ready for JSON, and the traces and ids that they come from.

    Raises:
        ValueError: the corpus has less than one sequence of held-out text.
    """
    shape = pretrained.recipe.model
    batches = held_out_tokens(pretrained, corpus, num_tokens, micro_batch_size)
    traces, token_M = record(pretrained, batches)
    mean_nnz_M = np.mean([trace.count_M for trace in traces], axis=0)
    extremes = token_extremes(mean_nnz_M, token_M, SHOWN_TOKENS, MIN_OCCURRENCES)
    statistics = {
        "checkpoint": str(pretrained.path),
        "step": pretrained.trainer.get("step"),
        "corpus": corpus.name,
        "tokens": len(token_M),
        "context_length": shape.context_length,
        "intermediate_size": shape.intermediate_size,
        "layers": [layer_statistics(trace, shape.context_length) for trace in traces],
        "tokens_by_nnz": {
            end: [
                {
                    "id": token,
                    "text": pretrained.tokenizer.decode([token]),
                    "nnz_mean": mean,
                    "occurrences": occurrences,
                }
                for token, mean, occurrences in found
            ]
            for end, found in zip(("lowest", "highest"), extremes, strict=True)
        },
    }
    return statistics, traces, token_M.reshape(-1, shape.context_length)


def held_out_corpus(recipe: Recipe, files: list[str] | None) -> Corpus:
    """What is measured on: all of the files (globs), or the recipe's corpus if there are none.

    Raises:
        FileNotFoundError: no such files.
        ValueError: their format is unknown, or the recipe's corpus cannot be read here or has no
            held-out text.
    """
    if files:
        found = load_corpus("local", files=files)
        return dataclasses.replace(found, validation=found.train)
    data, remedy = recipe.data, "name text to measure on: --data GLOB"
    try:
        found = load_corpora(**data.sources())[0]
    except (OSError, ValueError) as error:
        raise ValueError(f"the recipe's corpus cannot be read ({error}); {remedy}") from error
    if not found.validation:
        raise ValueError(f"the recipe's corpus {found.name} has no held-out text; {remedy}")
    return found


def held_out_tokens(
    pretrained: Pretrained, corpus: Corpus, num_tokens: int, micro_batch_size: int
) -> Iterator[Tensor]:
    """Input tokens of the held-out text, int64 (at most micro_batch_size, context_length)."""
    batches = validation_batches(
        corpus,
        pretrained.tokenizer,
        context_length=pretrained.recipe.model.context_length,
        micro_batch_size=micro_batch_size,
        num_tokens=num_tokens,
        rank=0,
        world_size=1,
    )
    for batch_BT1 in batches:
        yield batch_BT1[:, :-1]


@torch.no_grad()
def record(
    pretrained: Pretrained, batches: Iterator[Tensor]
) -> tuple[list[Trace], NDArray[np.int64]]:
    """The traces of all layers, and the token of each of their rows."""
    model = pretrained.model
    neurons = pretrained.recipe.model.intermediate_size
    ffns = [layer.mlp for layer in model.model.layers]
    counts: list[list[NDArray]] = [[] for _ in ffns]
    indices: list[list[NDArray]] = [[] for _ in ffns]
    tokens = []

    def keep(layer: int, active_MN: Tensor) -> None:
        dtype = index_dtype(neurons)
        counts[layer].append(active_MN.sum(1).cpu().numpy().astype(dtype))
        # `nonzero` lists row by row, columns ascending.
        indices[layer].append(active_MN.nonzero()[:, 1].cpu().numpy().astype(dtype))

    with _patterns(ffns, keep):
        for batch_BT in batches:
            tokens.append(batch_BT.numpy().reshape(-1))
            model.model(batch_BT.to(model.device), use_cache=False)
    traces = [
        Trace(np.concatenate(count), np.concatenate(index), neurons)
        for count, index in zip(counts, indices, strict=True)
    ]
    return traces, np.concatenate(tokens)


@contextmanager
def _patterns(ffns: list[SparseFFN], keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Calls ``keep(layer, active_MN)`` for every forward pass of an FFN."""

    def recording(layer: int, ffn: SparseFFN) -> Callable[[Tensor], tuple[Tensor, FFNStats]]:
        forward = ffn.forward_with_stats

        def run(x: Tensor) -> tuple[Tensor, FFNStats]:
            x_MK = x.reshape(-1, x.shape[-1])
            # The same product as in the FFN, so the same zeros.
            keep(
                layer, activation_function(ffn.activation)(F.linear(x_MK, ffn.pattern_weight)) != 0
            )
            return forward(x)

        return run

    # The blocks call this method and not the module, so that hooks of the module see nothing.
    for layer, ffn in enumerate(ffns):
        vars(ffn)["forward_with_stats"] = recording(layer, ffn)
    try:
        yield
    finally:
        for ffn in ffns:
            del vars(ffn)["forward_with_stats"]
