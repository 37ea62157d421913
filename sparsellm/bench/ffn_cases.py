"""What `sparsellm bench ffn` measures: its cases, and the inputs of each.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.bench import patterns
from sparsellm.ffn.token_order import token_order
from sparsellm.ffn.types import TokenOrder

TOKENS = (1, 8, 64, 2048, 16_384, 65_536)
NNZ = ("15", "30", "60", "120", "300", "50%")
DECODE_TOKENS = 64  # at most
DISTINCT_TOKENS = 16_384  # more are repetitions of these
VOCABULARY = 50_304  # of the traced model
TRACED_CONTEXT = 2048  # tokens, should the ids of a trace not say


class Shape(NamedTuple):
    """Of an FFN."""

    hidden_size: int
    intermediate_size: int
    gated: bool

    def __str__(self) -> str:
        name = f"{self.hidden_size}/{self.intermediate_size}"
        return name if self.gated else f"{name}/non-gated"


SHAPES = (
    Shape(2048, 5632, True),
    Shape(2048, 8192, False),
    Shape(4096, 14_336, True),
    Shape(5120, 13_824, True),
)
TRACED = SHAPES[0]  # the shape of the model whose traces are measured
# Read where no other traces are given; in a checkout, made as docs/experiments.md says.
SAMPLE_TRACES = Path("benchmarks/traces/sample.npz")


class Case(NamedTuple):
    """One setting; with a trace, `nnz` is None and every layer is measured."""

    tokens: int
    shape: Shape
    pattern: str
    nnz: int | None

    def __str__(self) -> str:
        nnz = "" if self.nnz is None else f" nnz {self.nnz}"
        return f"M {self.tokens} {self.shape} {self.pattern}{nnz}"


class Inputs(NamedTuple):
    """What a case computes on."""

    x_MK: Tensor
    w_NK: Tensor  # whose product with x decides the pattern
    nnz: float  # mean
    union_64: float  # mean over blocks of 64 tokens, or of all where there are fewer
    ids_BT: Tensor | None = None  # of a trace that has them
    order: TokenOrder | None = None  # in which ours computes; None is that of x


def parse_shape(text: str) -> Shape:
    """``K/N``, or ``K/N/non-gated``.

    Raises:
        ValueError: it is neither.
    """
    sizes, gated = text.removesuffix("/non-gated"), not text.endswith("/non-gated")
    try:
        hidden_size, intermediate_size = map(int, sizes.split("/"))
    except ValueError as error:
        message = f"--shape {text}: give K/N, such as 2048/5632, or K/N/non-gated"
        raise ValueError(message) from error
    if min(hidden_size, intermediate_size) < 16 or hidden_size % 8 or intermediate_size % 8:
        raise ValueError(f"--shape {text}: both must be multiples of 8, from 16")
    return Shape(hidden_size, intermediate_size, gated)


def parse_nnz(text: str, num_neurons: int) -> int:
    """A number of non-zeros, or a percentage of the neurons.

    Raises:
        ValueError: it is neither, or not between 1 and 90% of the neurons.
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else int(text) / num_neurons
        nnz = round(share * num_neurons)
    except ValueError as error:
        raise ValueError(f"--nnz {text}: give a number, or a percentage such as 50%") from error
    if not 1 <= nnz <= 0.9 * num_neurons:
        raise ValueError(f"--nnz {text}: not between 1 and 90% of {num_neurons} neurons")
    return nnz


def grid(
    tokens: Iterable[int], shapes: Iterable[Shape], names: Iterable[str], nnz: Iterable[str]
) -> list[Case]:
    """All cases; those that share a compiled function follow one another.

    Raises:
        ValueError: a number of tokens or of non-zeros that cannot be.
    """
    tokens, names, nnz = list(tokens), list(names), list(nnz)
    if min(tokens) < 1:
        raise ValueError(f"--M {min(tokens)}: must be positive")
    synthetic = [name for name in names if name != "trace"]
    found = []
    for shape in shapes:
        targets = [parse_nnz(text, shape.intermediate_size) for text in nnz]
        for m in tokens:
            if "trace" in names and shape == TRACED:
                found.append(Case(m, shape, "trace", None))
            found += [Case(m, shape, name, target) for name in synthetic for target in targets]
    return found


def synthetic_inputs(case: Case, device: torch.device) -> Inputs:
    """Inputs of a case whose pattern is ``uniform`` or ``skewed``."""
    assert case.nnz is not None
    generator = torch.Generator(device).manual_seed(0)
    distinct = min(case.tokens, DISTINCT_TOKENS)
    k, n = case.shape.hidden_size, case.shape.intermediate_size
    x, w = patterns.threshold_gate(case.pattern, distinct, k, n, nnz=case.nnz, generator=generator)
    return Inputs(_repeated(x, case.tokens), w, *patterns.describe(x, w))


def trace_inputs(
    case: Case,
    traces: Path,
    layer: int,
    device: torch.device,
    ids_BT: NDArray[np.int64] | None = None,
) -> Inputs:
    """Inputs that make the case's FFN fire as a recorded layer did.

    Of fewer tokens than were recorded it gets neighbours whose mean is like all; of more,
    repetitions. ``ids_BT``: of all recorded tokens.

    Raises:
        ValueError: as many ids as tokens were not recorded.
    """
    x, w, count_M = _fitted(traces, layer, case.shape, device)
    if ids_BT is not None and ids_BT.size != len(x):
        raise ValueError(f"{ids_BT.size:,} ids do not belong to a trace of {len(x):,} tokens")
    window = patterns.representative_window(count_M, min(case.tokens, len(x)))
    inputs = Inputs(_repeated(x[window], case.tokens), w, *patterns.describe(x[window], w))
    if ids_BT is None or case.tokens > len(x):  # repetitions would be sorted side by side
        return inputs
    length = ids_BT.shape[1] if case.tokens % ids_BT.shape[1] == 0 else case.tokens
    ids = torch.from_numpy(ids_BT.reshape(-1)[window].reshape(-1, length)).to(device)
    return inputs._replace(ids_BT=ids)


def in_token_order(inputs: Inputs) -> Inputs | None:
    """The same, ours in the order that the tokens' ids give; None where there are no ids."""
    if inputs.ids_BT is None or len(inputs.x_MK) <= DECODE_TOKENS:
        return None
    order = token_order(inputs.ids_BT, VOCABULARY)
    union_64 = patterns.describe(inputs.x_MK[order.token_M], inputs.w_NK)[1]
    return inputs._replace(order=order, union_64=union_64)


@functools.lru_cache(maxsize=64)
def _fitted(
    traces: Path, layer: int, shape: Shape, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x and W of a whole layer, and its non-zeros a token: seconds of work, for all M at once."""
    pattern_MN = patterns.trace_pattern(traces, layer, shape.intermediate_size, device)
    x, w = patterns.fit_gate(pattern_MN, shape.hidden_size)
    return x, w, pattern_MN.sum(1)


def _repeated(x_MK: Tensor, m: int) -> Tensor:
    return x_MK.repeat(-(-m // len(x_MK)), 1)[:m].contiguous()
