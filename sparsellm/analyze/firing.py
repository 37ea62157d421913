"""Runs real text through a model: counts every layer's pattern, and keeps the first as traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.analyze.tally import LayerTally, TokenTally
from sparsellm.analyze.trace import Trace, index_dtype
from sparsellm.data.corpus import Corpus, load_corpora, load_corpus
from sparsellm.data.held_out import validation_batches
from sparsellm.ffn.module import SparseFFN
from sparsellm.ffn.reference import activation_function
from sparsellm.ffn.types import FFNStats
from sparsellm.recipe import Recipe
from sparsellm.runs.pretrained import Pretrained

SHOWN_TOKENS = 32  # of each end
# Rarer tokens are excluded from the extremes: the paper's filter is one in 2¹⁴. The minimum is for
# short texts.
RAREST_TOKEN, MIN_OCCURRENCES = 2**14, 8


class Analysis(NamedTuple):
    """The results of `analyze`."""

    statistics: dict[str, Any]  # ready for JSON
    traces: list[Trace]  # of the first tokens, a layer each
    ids_BT: NDArray[np.int64]  # of the traces' rows


def analyze(
    pretrained: Pretrained,
    corpus: Corpus,
    num_tokens: int,
    micro_batch_size: int,
    trace_tokens: int,
) -> Analysis:
    """Counts activations over ``num_tokens``, and keeps the patterns of the first ``trace_tokens``.

    Both are in whole sequences. Memory does not grow with ``num_tokens``.

    Raises:
        ValueError: the corpus has less than one sequence of held-out text.
    """
    recipe, device = pretrained.recipe, pretrained.model.device
    shape = recipe.model
    layers = [
        LayerTally(shape.intermediate_size, shape.context_length, device)
        for _ in range(shape.num_hidden_layers)
    ]
    by_token = TokenTally(recipe.padded_vocab_size, device)
    tracer = Tracer(shape.num_hidden_layers, shape.intermediate_size, trace_tokens)
    batches = held_out_tokens(pretrained, corpus, num_tokens, micro_batch_size)
    tokens = 0
    for token_BT, patterns in fired(pretrained, batches):
        nnz = [tally.update(active) for tally, active in zip(layers, patterns, strict=True)]
        token_M = token_BT.reshape(-1)
        by_token.update(token_M.to(device), torch.stack(nnz).double().mean(0))
        tracer.update(token_M, patterns)
        tokens += len(token_M)
    extremes = by_token.extremes(SHOWN_TOKENS, max(tokens // RAREST_TOKEN, MIN_OCCURRENCES))
    statistics = {
        "checkpoint": str(pretrained.path),
        "step": pretrained.trainer.get("step"),
        "corpus": corpus.name,
        "tokens": tokens,
        "context_length": shape.context_length,
        "intermediate_size": shape.intermediate_size,
        "layers": [tally.statistics() for tally in layers],
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
    traces, ids_M = tracer.traces()
    return Analysis(statistics, traces, ids_M.reshape(-1, shape.context_length))


def held_out_corpus(recipe: Recipe, files: list[str] | None) -> Corpus:
    """The text to measure on: all of the files (globs), or the recipe's corpus if none are given.

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
def fired(
    pretrained: Pretrained, batches: Iterator[Tensor]
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Each batch's token ids (B, T) and the pattern of every layer: active_MN, bool."""
    model = pretrained.model
    ffns = [layer.mlp for layer in model.model.layers]
    patterns: dict[int, Tensor] = {}
    with _patterns(ffns, patterns.__setitem__):
        for batch_BT in batches:
            model.model(batch_BT.to(model.device), use_cache=False)
            yield batch_BT, [patterns[layer] for layer in range(len(ffns))]


class Tracer:
    """Keeps the patterns of the first tokens, in whole sequences of their batches."""

    def __init__(self, num_layers: int, num_neurons: int, num_tokens: int) -> None:
        self._num_neurons, self._num_tokens = num_neurons, num_tokens
        self._counts: list[list[NDArray]] = [[] for _ in range(num_layers)]
        self._indices: list[list[NDArray]] = [[] for _ in range(num_layers)]
        self._tokens: list[NDArray] = []

    def update(self, token_M: Tensor, patterns: list[Tensor]) -> None:
        """Adds a batch, if there are too few tokens yet."""
        if sum(map(len, self._tokens)) >= self._num_tokens:
            return
        self._tokens.append(token_M.numpy())
        dtype = index_dtype(self._num_neurons)
        for layer, active_MN in enumerate(patterns):
            self._counts[layer].append(active_MN.sum(1).cpu().numpy().astype(dtype))
            # `nonzero` lists row by row, columns ascending.
            self._indices[layer].append(active_MN.nonzero()[:, 1].cpu().numpy().astype(dtype))

    def traces(self) -> tuple[list[Trace], NDArray[np.int64]]:
        """The traces of all layers, and the token of each of their rows."""
        traces = [
            Trace(np.concatenate(count), np.concatenate(index), self._num_neurons)
            for count, index in zip(self._counts, self._indices, strict=True)
        ]
        return traces, np.concatenate(self._tokens)


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

    # Blocks call this method, not the module, so module hooks would not be called.
    for layer, ffn in enumerate(ffns):
        vars(ffn)["forward_with_stats"] = recording(layer, ffn)
    try:
        yield
    finally:
        for ffn in ffns:
            del vars(ffn)["forward_with_stats"]
