"""The cases that `sparsellm bench ffn` and ``ffn-train`` measure, and the inputs of each.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.bench import patterns
from sparsellm.ffn.token_order import token_order
from sparsellm.ffn.types import Format, TokenOrder

DECODE_TOKENS = 64  # cases of at most so many tokens are measured as decoding
DISTINCT_TOKENS = 16_384  # larger inputs repeat these
VOCABULARY = 50_304  # vocabulary size of the traced model


class Shape(NamedTuple):
    """Shape of an FFN."""

    hidden_size: int
    intermediate_size: int
    gated: bool

    def __str__(self) -> str:
        name = f"{self.hidden_size}/{self.intermediate_size}"
        return name if self.gated else f"{name}/non-gated"


TRACED = Shape(2048, 5632, True)  # of the model whose traces are measured, and the default
# The default traces, and how anybody makes them: two minutes on one GPU, nothing is downloaded.
SAMPLE_TRACES = Path("benchmarks/traces/sample/traces.npz")
SAMPLE_COMMANDS = (
    "sparsellm train pilot --set name=sample --set data.corpus=sample "
    "--set train.global_batch_tokens=65536 --set sparsity.target_nnz=20 "
    "--set sparsity.l1_coefficient=2e-4 && "
    "sparsellm analyze runs/sample --tokens 65536 --trace-layers 1 4 "
    f"--out {SAMPLE_TRACES.parent}"
)


class Case(NamedTuple):
    """One setting. With a trace, `nnz` is None and every layer is measured."""

    tokens: int
    shape: Shape
    pattern: str
    nnz: int | None

    def __str__(self) -> str:
        nnz = "" if self.nnz is None else f" nnz {self.nnz}"
        return f"M {self.tokens} {self.shape} {self.pattern}{nnz}"


class Layer(NamedTuple):
    """One FFN with its inputs, and a way in which ours computes it; dense is always bf16."""

    x_MK: Tensor
    w_NK: Tensor  # gate weights: their product with x determines the pattern
    gated: bool
    nnz: float  # mean non-zeros per token
    union_64: float  # mean over blocks of 64 tokens; of all tokens if there are fewer
    ids_BT: Tensor | None = None  # token ids, if the trace has them
    order: TokenOrder | None = None  # order in which ours computes; None: that of x
    format: Format = "union"
    fp8: bool = False  # whether ours computes its gate in FP8

    @property
    def most_off(self) -> float:
        """The largest difference from dense, relative to it, that is not an error of the kernels.

        A third of bf16's is rounding. FP8 is a few percent off on patterns of trained models;
        synthetic patterns come from sums of large numbers that nearly cancel.
        """
        return 0.25 if self.fp8 else 0.03


def parse_shape(text: str) -> Shape:
    """``K/N``, or ``K/N/non-gated``.

    Raises:
        ValueError: the text has neither form.
    """
    sizes, gated = text.removesuffix("/non-gated"), not text.endswith("/non-gated")
    try:
        hidden_size, intermediate_size = map(int, sizes.split("/"))
    except ValueError as error:
        message = f"--shape {text}: give K/N, such as 2048/5632, or K/N/non-gated"
        raise ValueError(message) from error
    if min(hidden_size, intermediate_size) < 16 or hidden_size % 8 or intermediate_size % 8:
        raise ValueError(f"--shape {text}: both must be multiples of 8 and at least 16")
    return Shape(hidden_size, intermediate_size, gated)


def parse_nnz(text: str, num_neurons: int) -> int:
    """Parses a number of non-zeros or a percentage of the neurons.

    Raises:
        ValueError: the text is neither, or not between 1 and 90% of the neurons.
    """
    try:
        percent = text.endswith("%")
        nnz = round(float(text[:-1]) / 100 * num_neurons) if percent else int(text)
    except ValueError as error:
        raise ValueError(f"--nnz {text}: give a number, or a percentage such as 50%") from error
    if not 1 <= nnz <= 0.9 * num_neurons:
        raise ValueError(f"--nnz {text}: not between 1 and 90% of {num_neurons} neurons")
    return nnz


def selected(options: argparse.Namespace) -> list[Case]:
    """The cases of ``--M``, ``--shape``, ``--pattern`` and ``--nnz``.

    Raises:
        ValueError: there is none, or an option is out of range.
    """
    synthetic = [name for name in options.pattern if name != "trace"]
    cases = []
    for shape in map(parse_shape, options.shape):
        targets = [parse_nnz(text, shape.intermediate_size) for text in options.nnz]
        for m in options.M:
            if "trace" in options.pattern and shape == TRACED:
                cases.append(Case(m, shape, "trace", None))
            cases += [Case(m, shape, name, nnz) for name in synthetic for nnz in targets]
    if not cases:
        raise ValueError(f"traces are of {TRACED}: --shape and --pattern select no case")
    return cases


def synthetic_layer(case: Case, device: torch.device) -> Layer:
    """The FFN of a case whose pattern is ``uniform`` or ``skewed``."""
    assert case.nnz is not None
    generator = torch.Generator(device).manual_seed(0)
    distinct = min(case.tokens, DISTINCT_TOKENS)
    k, n, gated = case.shape
    x, w = patterns.threshold_gate(case.pattern, distinct, k, n, nnz=case.nnz, generator=generator)
    return Layer(_repeated(x, case.tokens), w, gated, *patterns.describe(x, w))


class Traced(NamedTuple):
    """Inputs for all tokens of a recorded layer, for which the same neurons are active as there."""

    x_MK: Tensor
    w_NK: Tensor
    count_M: Tensor  # non-zeros per token

    def layer(self, tokens: int, ids_BT: Tensor | None = None) -> Layer:
        """The FFN with a number of tokens; ``ids_BT`` are the ids of all that were recorded.

        Fewer tokens than were recorded are a window of neighbours, whose mean number of non-zeros
        is close to that of all. For more, the recorded tokens are repeated. These get no ids, since
        equal tokens would lie side by side when sorted; nor do the few tokens of decoding.
        """
        recorded = len(self.x_MK)
        window = patterns.representative_window(self.count_M, min(tokens, recorded))
        x_MK = self.x_MK[window]
        described = patterns.describe(x_MK, self.w_NK)
        layer = Layer(_repeated(x_MK, tokens), self.w_NK, TRACED.gated, *described)
        if ids_BT is None or not DECODE_TOKENS < tokens <= recorded:
            return layer
        length = ids_BT.shape[1] if tokens % ids_BT.shape[1] == 0 else tokens
        return layer._replace(ids_BT=ids_BT.reshape(-1)[window].reshape(-1, length))


def in_token_order(layer: Layer, ids_BT: Tensor) -> Layer:
    """The same, computed in the order of its token ids."""
    order = token_order(ids_BT, VOCABULARY)
    union_64 = patterns.describe(layer.x_MK[order.token_M], layer.w_NK)[1]
    return layer._replace(order=order, union_64=union_64)


def _repeated(x_MK: Tensor, m: int) -> Tensor:
    return x_MK.repeat(-(-m // len(x_MK)), 1)[:m].contiguous()
