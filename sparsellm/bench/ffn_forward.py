"""One FFN forward at a given pattern: ours in each format, against dense under torch.compile.

"Ours" is what a user gets: `SparseFFN` under `sparsellm.accelerate`, in inference mode. In token
order its time includes the layer's share of the sort and the copy of its input in that order. Up to
64 tokens the benchmark is ``ffn_decode``, measured eagerly and as a CUDA graph, with several copies
of the weights in turn, so that they do not stay in the cache. Above 64 tokens it is
``ffn_forward``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sparsellm
from sparsellm.bench import timing
from sparsellm.bench.compare import Comparison, refuse_if_off, relative_difference
from sparsellm.bench.ffn_cases import DECODE_TOKENS, Case, FFNVariant, Inputs
from sparsellm.bench.ffn_run import FFNBench, dense, dense_weights, new_ffn
from sparsellm.bench.record import Found
from sparsellm.bench.timing import Side


def measure(options: argparse.Namespace, device: torch.device | None = None) -> Iterator[Found]:
    """Measures the cases that the options of `cli.ffn_options` select."""
    bench = FFNBench(options, device)

    def build(
        case: Case, inputs: Inputs, variant: FFNVariant, key: dict[str, Any]
    ) -> Iterator[Comparison]:
        copies = 1
        if case.tokens <= DECODE_TOKENS:
            copies = timing.copies_beyond_cache(inputs.w_NK.nbytes, bench.device)
        ours: list[Callable[[], Tensor]] = []
        compiled: list[Callable[[], Tensor]] = []
        for _ in range(copies):
            ffn = new_ffn(case.shape, inputs.w_NK).requires_grad_(False).eval()
            arguments = (inputs.x_MK, *dense_weights(ffn))
            compiled.append(partial(bench.compiled, *arguments))
            done = sparsellm.accelerate(
                ffn,
                kernels=options.kernels,
                format=variant.format,
                precision="fp8" if variant.fp8 else "own",
            )
            if done.left_alone:
                raise ValueError("; ".join(done.left_alone.values()))
            done.prefill.order = inputs.order
            ours.append(partial(ffn, inputs.x_MK))

        def check() -> float:
            difference = relative_difference(ours[-1](), dense(*arguments))
            return refuse_if_off(f"ours ({variant.format})", difference, variant.most_off)

        def outcome() -> dict[str, Any]:
            chosen = [path for paths in done.paths().values() for path in paths.values()]
            return {"path": chosen[0] if chosen else options.kernels}

        launches = {"eager": _in_turn, "graph": _captured} if copies > 1 else {"": _in_turn}
        for launch, side in launches.items():
            yield Comparison(
                bench="ffn_decode" if launch else "ffn_forward",
                case=key | {"kernels": options.kernels} | ({"launch": launch} if launch else {}),
                dense=side(compiled),
                ours=side(ours),
                tokens=case.tokens,
                check=check,
                charged={"forward": bench.sort_share(inputs)},
                outcome=outcome,
            )

    yield from bench.run(build)


def _in_turn(calls: list[Callable[[], Tensor]]) -> Side:
    return Side({"forward": timing.in_turn(calls)})


def _captured(calls: list[Callable[[], Tensor]]) -> Side:
    with torch.inference_mode():
        return Side({"forward": timing.graph(calls)}, calls=len(calls))
