"""One FFN forward at a given pattern: ours in each format, against dense under torch.compile.

"Ours" is what a user gets: `SparseFFN` under `sparsellm.accelerate`, in inference mode. In token
order its time includes the layer's share of the sort and the copy of its input in that order. Above
64 tokens the benchmark is ``ffn_forward``. Up to 64 it is ``ffn_decode``: a CUDA graph that calls
several copies of the weights in turn, so that they do not stay in the cache.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sparsellm
from sparsellm.bench import timing
from sparsellm.bench.compare import Comparison, warm_up
from sparsellm.bench.ffn_cases import DECODE_TOKENS, Case, FFNVariant, Inputs
from sparsellm.bench.ffn_run import FFNBench, dense, dense_weights, new_ffn
from sparsellm.bench.record import Found
from sparsellm.bench.timing import Side


def measure(options: argparse.Namespace, device: torch.device | None = None) -> Iterator[Found]:
    """Measures the cases that the options of `cli.ffn_options` select."""
    bench = FFNBench(options, device)

    def build(case: Case, inputs: Inputs, variant: FFNVariant, key: dict[str, Any]) -> Comparison:
        decodes = case.tokens <= DECODE_TOKENS
        copies = timing.copies_beyond_cache(inputs.w_NK.nbytes, bench.device) if decodes else 1
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

        def outcome() -> dict[str, Any]:
            chosen = [path for paths in done.paths().values() for path in paths.values()]
            return {"path": chosen[0] if chosen else options.kernels}

        return Comparison(
            bench="ffn_decode" if decodes else "ffn_forward",
            case=key | {"kernels": options.kernels} | ({"launch": "graph"} if decodes else {}),
            dense=_side(compiled, bench.device),
            ours=_side(ours, bench.device),
            tokens=case.tokens,
            results=lambda: [(f"ours ({variant.format})", ours[-1](), dense(*arguments))],
            most_off=variant.most_off,
            charged={"forward": bench.sort_share(inputs)},
            outcome=outcome,
        )

    yield from bench.run(build)


def _side(calls: list[Callable[[], Tensor]], device: torch.device) -> Side:
    if len(calls) == 1:
        return Side({"forward": calls[0]})
    with torch.inference_mode():
        for call in calls:
            warm_up(Side({"forward": call}), device)
        return Side({"forward": timing.graph(calls)}, calls=len(calls))
