"""Which token order of a micro-batch gives the smallest unions: several sort keys, on a trace.

Uses numpy, no GPU. A key is a tuple of columns by which tokens are sorted, the most significant
first; ties keep the order of the text. M tokens, N neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsellm.analyze.summary import mean_union
from sparsellm.analyze.trace import Trace
from sparsellm.bench.record import Measurement
from sparsellm.ffn.types import BLOCK_TOKENS

Column = NDArray[Any]  # integers or booleans
EARLY = (0, 4, 8, 16, 32)  # number of positions that come first, whatever their token
RARE = 4  # ids with at most so many occurrences say little
SEED = 0  # seed of the hash that compares patterns


class _Tokens(NamedTuple):
    """The columns of keys, each (M,)."""

    id: Column
    before: Column  # the preceding id in its sequence; -1 for the first
    frequency: Column  # occurrences of its id among these tokens
    position: Column
    sequence: Column


def run(traces: list[Trace], ids_BT: NDArray[np.integer], name: str) -> Iterator[list[Measurement]]:
    """The mean union of 64 tokens for each key, per layer and overall; baseline: the text's order.

    Args:
        traces: the trace of each layer.
        ids_BT: token ids.
        name: name of the trace, for the records.

    Raises:
        ValueError: the number of ids is not the number of recorded tokens.
    """
    if ids_BT.size != traces[0].num_tokens:
        raise ValueError(
            f"{ids_BT.size:,} ids do not belong to a trace of {traces[0].num_tokens:,} tokens"
        )
    tokens = _tokens(ids_BT)
    natural: list[float] = []
    for key, columns_of in _keys(tokens, traces).items():
        unions = [
            mean_union(trace, BLOCK_TOKENS, _rows(columns_of(layer)))
            for layer, trace in enumerate(traces)
        ]
        unions.append(float(np.mean(unions)))
        natural = natural or unions
        case = {"trace": name, "tokens": ids_BT.size, "key": key}
        metrics = [*(f"layer {layer}" for layer in range(len(traces))), "mean"]
        yield [
            Measurement("token_order", case, metric, value, "neurons", base, base / value)
            for metric, value, base in zip(metrics, unions, natural, strict=True)
        ]


def rows(found: list[Measurement]) -> list[str]:
    """The printed line of a key."""
    values = " ".join(f"{m.value:6.0f}" for m in found)
    return [f"{found[0].case['key']:52} {values}  {1 / (found[-1].ratio or 1):.3f}×"]


def _tokens(ids_BT: NDArray[np.integer]) -> _Tokens:
    ids_BT = ids_BT.astype(np.int64)
    before_BT = np.roll(ids_BT, 1, axis=1)
    before_BT[:, 0] = -1
    sequence_BT, position_BT = np.indices(ids_BT.shape)
    frequency_BT = np.bincount(ids_BT.reshape(-1))[ids_BT]
    every = (ids_BT, before_BT, frequency_BT, position_BT, sequence_BT)
    return _Tokens(*(values.reshape(-1) for values in every))


def _keys(t: _Tokens, traces: list[Trace]) -> dict[str, Callable[[int], tuple[Column, ...]]]:
    """The keys by name, as functions of the layer."""
    known = (t.frequency, t.id, t.before)
    late = t.position >= 16
    rare = t.frequency <= RARE
    hashes = [(_smallest_hash(trace, SEED), _smallest_hash(trace, SEED + 1)) for trace in traces]
    signature = [_signature(trace, t.id) for trace in traces]

    def before_layer(layer: int) -> tuple[Column, ...]:
        return hashes[max(layer - 1, 0)]

    found: dict[str, Callable[[int], tuple[Column, ...]]] = {
        "none: the order of the text": lambda _: (np.zeros_like(t.id),)
    }
    for early in EARLY:
        columns = (t.position >= early, *known)
        found[f"{early} early, frequency, id, id before"] = partial(_constant, columns)
    found |= {
        "16 early, frequency, id": lambda _: (late, t.frequency, t.id),
        "16 early, id, id before": lambda _: (late, t.id, t.before),
        "… frequency, id, id before, in each sequence": lambda _: (t.sequence, late, *known),
        "… pattern of the layer before": lambda i: (late, *before_layer(i)),
        f"… as known up to {RARE} times, else frequency, id": lambda i: (
            late,
            ~rare,
            *(
                np.where(rare, own, other)
                for own, other in zip(before_layer(i), known, strict=False)
            ),
        ),
        "… neuron typical of the id (hindsight), id": lambda i: (late, signature[i], *known),
        "… own pattern (hindsight)": lambda i: (late, *hashes[i]),
        f"… own pattern up to {RARE} times (hindsight), else frequency, id": lambda i: (
            late,
            ~rare,
            *(np.where(rare, own, other) for own, other in zip(hashes[i], known, strict=False)),
        ),
    }
    return found


def _constant(columns: tuple[Column, ...], _: int) -> tuple[Column, ...]:
    return columns


def _rows(key: tuple[Column, ...]) -> NDArray[np.int64]:
    """The position of each token in the sorted order."""
    token_M = np.lexsort(key[::-1])
    row_M = np.empty_like(token_M)
    row_M[token_M] = np.arange(len(token_M))
    return row_M


def _smallest_hash(trace: Trace, seed: int) -> Column:
    """MinHash: equal for two tokens with the probability intersection/union of their neurons."""
    hash_N = np.random.default_rng(seed).permutation(trace.num_neurons)
    smallest_M = np.full(trace.num_tokens, trace.num_neurons)
    np.minimum.at(smallest_M, trace.rows, hash_N[trace.index])
    return smallest_M


def _signature(trace: Trace, id_M: Column) -> Column:
    """The neuron that is most typical of each token's id, relative to all tokens."""
    n = trace.num_neurons
    activity_N = np.bincount(trace.index, minlength=n)
    pair, count = np.unique(id_M[trace.rows] * n + trace.index, return_counts=True)
    of_id, neuron = pair // n, pair % n
    order = np.lexsort((-count / np.sqrt(activity_N[neuron] + 1.0), of_id))
    first = np.append(True, np.diff(of_id[order]) > 0)
    typical = np.full(int(id_M.max()) + 1, n)
    typical[of_id[order][first]] = neuron[order][first]
    return typical[id_M]
