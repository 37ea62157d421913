"""One FFN forward at a given pattern: ours in each format, against dense under torch.compile.

"Ours" is what a user gets: `SparseFFN` under `sparsellm.accelerate`, in inference mode. In token
order its time includes the layer's share of the sort and the copy of its input in that order. Above
64 tokens the benchmark is ``ffn_forward``. Up to 64 it is ``ffn_decode``: a CUDA graph that calls
several copies of the weights in turn, so that they do not stay in the cache.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sparsellm
from sparsellm.bench import timing
from sparsellm.bench.compare import warm_up
from sparsellm.bench.ffn_cases import DECODE_TOKENS, Layer
from sparsellm.bench.ffn_run import FFNBench, dense, dense_weights, new_ffn
from sparsellm.bench.record import Measurement
from sparsellm.bench.timing import Configuration
from sparsellm.ffn.inference_path.accelerate import Precision


def measure(
    options: argparse.Namespace, device: torch.device | None = None
) -> Iterator[list[Measurement]]:
    """Measures the cases that the options of `cli.ffn_options` select."""
    bench = FFNBench(options, device)
    yield from bench.run(partial(_forward, bench, options.kernels))


def _forward(bench: FFNBench, kernels: Any, layer: Layer, key: dict[str, Any]) -> list[Measurement]:
    tokens = len(layer.x_MK)
    decodes = tokens <= DECODE_TOKENS
    copies = 1
    if decodes:  # gates of over three times the size of the cache
        cache: int = torch.cuda.get_device_properties(bench.device).L2_cache_size
        copies = max(2, -(-3 * cache // layer.w_NK.nbytes))
    precision: Precision = "fp8" if layer.fp8 else "model"
    ours: list[Callable[[], Tensor]] = []
    compiled: list[Callable[[], Tensor]] = []
    for _ in range(copies):
        ffn = new_ffn(layer).requires_grad_(False).eval()
        arguments = (layer.x_MK, *dense_weights(ffn))
        compiled.append(partial(bench.compiled, *arguments))
        done = sparsellm.accelerate(ffn, kernels=kernels, format=layer.format, precision=precision)
        if done.left_alone:
            raise ValueError("; ".join(done.left_alone.values()))
        done.prefill.order = layer.order
        ours.append(partial(ffn, layer.x_MK))
    measurements = bench.compare(
        "ffn_decode" if decodes else "ffn_forward",
        key | {"kernels": kernels} | ({"launch": "graph"} if decodes else {}),
        _configuration(compiled, bench.device),
        _configuration(ours, bench.device)._replace(charged_ms=bench.sort_share(layer)),
        tokens=tokens,
        results=lambda: [(f"ours ({layer.format})", ours[-1](), dense(*arguments))],
        most_off=layer.most_off,
    )
    chosen = [path for paths in done.paths().values() for path in paths.values()]
    path = chosen[0] if chosen else kernels
    return [replace(each, case=each.case | {"path": path}) for each in measurements]


def _configuration(calls: list[Callable[[], Tensor]], device: torch.device) -> Configuration:
    if len(calls) == 1:
        return Configuration({"forward": calls[0]})
    with torch.inference_mode():
        for call in calls:
            warm_up(Configuration({"forward": call}), device)
        return Configuration({"forward": timing.graph(calls)}, calls=len(calls))
