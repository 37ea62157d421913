"""Runs real text through a model: counts every layer's pattern, and keeps the first as traces."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel as HFModel

from sparsellm.analyze.tally import LayerTally, TokenTally
from sparsellm.analyze.trace import Trace, pattern_trace
from sparsellm.data.held_out import TooShortError, mixed_sequences
from sparsellm.data.text.corpus import Corpus, load_corpora, text_format
from sparsellm.data.text.shards import expand, to_shard
from sparsellm.ffn.reference import activation_function
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.recipe import Recipe
from sparsellm.runs.huggingface.pretrained import Pretrained
from sparsellm.waiting import warn

SHOWN_TOKENS = 32  # with the fewest non-zeros, and as many with the most
# Rarer tokens are excluded from the extremes: the paper's filter is one in 2¹⁴. The minimum is for
# short texts.
RAREST_TOKEN, MIN_OCCURRENCES = 2**14, 8


def analyze(
    pretrained: Pretrained,
    corpora: Sequence[Corpus],
    num_tokens: int,
    micro_batch_size: int,
    trace_tokens: int,
) -> tuple[dict[str, Any], list[Trace], NDArray[np.int64]]:
    """Counts activations over ``num_tokens``, and keeps the patterns of the first ``trace_tokens``.

    Both are in whole sequences. Memory does not grow with ``num_tokens``.

    Returns:
        The statistics, ready for JSON; the patterns as traces, one per layer; the ids of their
        tokens, (sequences, context_length).

    Raises:
        ValueError: there is less than one sequence of held-out text.
    """
    recipe, device = pretrained.recipe, pretrained.model.device
    shape = recipe.model
    layers = [LayerTally(shape.intermediate_size, device) for _ in range(shape.num_hidden_layers)]
    by_token = TokenTally(recipe.padded_vocab_size, device)
    traces_by_batch: list[list[Trace]] = []  # per batch, one per layer
    traced_ids: list[NDArray[np.int64]] = []
    batches = held_out_tokens(pretrained, corpora, num_tokens, micro_batch_size)
    tokens = 0
    for token_BT, patterns in activation_patterns(pretrained, batches):
        nnz = [tally.update(active) for tally, active in zip(layers, patterns, strict=True)]
        token_M = token_BT.reshape(-1)
        by_token.update(token_M.to(device), torch.stack(nnz).double().mean(0))
        missing = max(trace_tokens // shape.context_length, 1) - tokens // shape.context_length
        if missing > 0:  # sequences
            rows = missing * shape.context_length
            traces_by_batch.append([pattern_trace(active_MN[:rows]) for active_MN in patterns])
            traced_ids.append(token_BT[:missing].numpy())
        tokens += len(token_M)
    extremes = by_token.extremes(SHOWN_TOKENS, max(tokens // RAREST_TOKEN, MIN_OCCURRENCES))
    statistics = {
        "checkpoint": str(pretrained.path),
        "step": pretrained.trainer.get("step"),
        "corpus": name_of(corpora),
        "tokens": tokens,
        "context_length": shape.context_length,
        "intermediate_size": shape.intermediate_size,
        "layers": [tally.statistics() for tally in layers],
        "tokens_by_nnz": {
            end: [_described(pretrained, *token) for token in ranked_tokens]
            for end, ranked_tokens in zip(("lowest", "highest"), extremes, strict=True)
        },
    }
    traces = [_joined(of_layer) for of_layer in zip(*traces_by_batch, strict=True)]
    return statistics, traces, np.concatenate(traced_ids)


def _described(
    pretrained: Pretrained, token: int, nnz_mean: float, occurrences: int
) -> dict[str, Any]:
    """A token of the vocabulary, with the non-zeros that it has on average."""
    text = pretrained.tokenizer.decode([token])
    return {"id": token, "text": text, "nnz_mean": nnz_mean, "occurrences": occurrences}


def _joined(traces: Sequence[Trace]) -> Trace:
    """One trace of a layer's traces of consecutive batches."""
    return Trace(
        np.concatenate([trace.count_M for trace in traces]),
        np.concatenate([trace.index for trace in traces]),
        traces[0].num_neurons,
    )


def held_out_corpora(recipe: Recipe, files: list[str] | None) -> list[Corpus]:
    """The text to measure on: all of the files (globs), or the recipe's corpora if none are given.

    Of a mixture, those with held-out text; a warning names the others. Files have their text where
    the recipe's own have it (`text_format`).

    Raises:
        FileNotFoundError: no such files.
        ValueError: their format is unknown, or the recipe's corpus cannot be read here or has no
            held-out text.
    """
    if files:
        paths = expand(files, "--data", "--data GLOB").values()
        shards = tuple(to_shard(path, *text_format(recipe.data)) for path in paths)
        return [Corpus("local", shards, shards)]
    remedy = "name text of your own: --data GLOB"
    try:
        corpora = load_corpora(recipe.data)
    except (OSError, ValueError) as error:
        raise ValueError(f"the recipe's corpus cannot be read ({error}); {remedy}") from error
    held_out = [corpus for corpus in corpora if corpus.validation]
    if not held_out:
        names = ", ".join(corpus.name for corpus in corpora)
        raise ValueError(f"the recipe's corpus {names} has no held-out text; {remedy}")
    if unmeasured := [corpus.name for corpus in corpora if not corpus.validation]:
        warn(f"not measured, since it has no held-out text: corpus {', '.join(unmeasured)}")
    return held_out


def name_of(corpora: Sequence[Corpus]) -> str:
    """The names of corpora with their shares of the tokens."""
    if len(corpora) == 1:
        return corpora[0].name
    total = sum(corpus.weight for corpus in corpora)
    return ", ".join(f"{corpus.name} {corpus.weight / total:.3g}" for corpus in corpora)


def held_out_tokens(
    pretrained: Pretrained, corpora: Sequence[Corpus], num_tokens: int, micro_batch_size: int
) -> Iterator[Tensor]:
    """Input tokens of the held-out text, int64 (at most micro_batch_size, context_length).

    Of a mixture each corpus has its share, of any number of first batches too. If the model was not
    trained here, each sequence begins with what its tokenizer puts before a text: its neurons may
    be active for that alone.

    Raises:
        ValueError: there is less than one sequence.
    """
    length = pretrained.recipe.model.context_length
    begin = np.array([] if pretrained.trained else pretrained.begin_ids, dtype=np.int64)
    sequences = mixed_sequences(corpora, pretrained.tokenizer, length, num_tokens)
    try:
        while batch := list(islice(sequences, micro_batch_size)):
            rows = [np.concatenate([begin, sequence])[:length] for sequence in batch]
            yield torch.from_numpy(np.stack(rows))
    except TooShortError as error:
        raise ValueError(
            f"the text of {name_of(corpora)} is shorter than one sequence of {length:,} tokens; "
            "name more text: --data GLOB"
        ) from error


@torch.no_grad()
def activation_patterns(
    pretrained: Pretrained, batches: Iterator[Tensor]
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Each batch's token ids (B, T) and the pattern of every layer: active_MN, bool."""
    model = pretrained.model
    activation = activation_function(pretrained.recipe.ffn.activation)
    patterns: dict[int, Tensor] = {}

    def keep(layer: int, x_MK: Tensor, w_NK: Tensor) -> None:
        patterns[layer] = activation(F.linear(x_MK, w_NK)) != 0

    with watch_ffns(model, keep):
        for batch_BT in batches:
            model.model(batch_BT.to(model.device), use_cache=False)
            yield batch_BT, [patterns[layer] for layer in range(len(model.model.layers))]


@contextmanager
def watch_ffns(model: HFModel, see: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """Calls ``see(layer, x_MK, w_NK)`` before an FFN's forward pass, with its input.

    ``F.linear(x_MK, w_NK)`` is what the activation gets: the same product as in the FFN, so the
    same zeros.
    """

    def hook(layer: int) -> Callable[[SparseFFN, tuple[Tensor, ...]], None]:
        def before(ffn: SparseFFN, inputs: tuple[Tensor, ...]) -> None:
            see(layer, inputs[0].reshape(-1, inputs[0].shape[-1]), ffn.pattern_weight)

        return before

    with ExitStack() as hooks:
        for layer, block in enumerate(model.model.layers):
            hooks.enter_context(block.mlp.register_forward_pre_hook(hook(layer)))
        yield
