"""Each FFN of a trained model on its own inputs: `sparsellm.accelerate` against dense, one GPU.

The inputs are those that the model's layers pass to their FFNs on held-out text: real patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.bench import timing
from sparsellm.bench.ffn_sides import dense, dense_weights
from sparsellm.bench.record import Measurement
from sparsellm.ffn.reference import ffn_stats
from sparsellm.ffn.types import BLOCK_TOKENS

IN_A_ROW = 8  # calls: enough that the host's time is not what is measured


class LayerInput(NamedTuple):
    """The input of one FFN, and its activity."""

    x_MK: Tensor
    nnz: float  # per token
    union_64: float  # neurons that fire for any of 64 neighbouring tokens


@torch.inference_mode()
def layer_inputs(model: Any, call: Callable[[], object]) -> list[LayerInput]:
    """Inputs of every FFN in one ``call`` of a model that is neither accelerated nor compiled."""
    found: list[LayerInput] = []

    def keep(ffn: Any, given: tuple[Tensor, ...]) -> None:
        x_MK = given[0].reshape(-1, given[0].shape[-1])
        stats = ffn_stats(*(F.relu(F.linear(x_MK, ffn.pattern_weight)),) * 2)
        blocks = -(-len(x_MK) // BLOCK_TOKENS)
        nnz = float(stats.nnz_M.double().mean())
        found.append(LayerInput(x_MK, nnz, float(stats.union_sum) / blocks))

    hooks = [layer.mlp.register_forward_pre_hook(keep) for layer in model.model.layers]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.inference_mode()
def run(
    plain: Any, accelerated: Any, inputs: list[LayerInput], case: dict[str, Any], seconds: float
) -> Iterator[Measurement]:
    """One measurement per layer: ms of ours, with dense as baseline; a ratio above 1 is better.

    Args:
        plain: the model as it was trained.
        accelerated: the same model under `sparsellm.accelerate`, called until it has settled.
        inputs: from `layer_inputs`.
        case: keys of the model's case.
        seconds: seconds of timing per layer.
    """
    compiled = torch.compile(dense)
    for number, given in enumerate(inputs):
        ffn, ours = (model.model.layers[number].mlp for model in (plain, accelerated))
        sides = {
            "dense": [partial(compiled, given.x_MK, *dense_weights(ffn))],
            "ours": [partial(ours, given.x_MK)],
        }
        for _ in range(3):
            for [call] in sides.values():
                call()
        ms = timing.ms_of_a_call(sides, timing.in_a_row, IN_A_ROW, seconds)
        own = case | {"layer": number, "measured_nnz": given.nnz, "union_64": given.union_64}
        ratio = ms["dense"] / ms["ours"]
        yield Measurement("layer_forward", own, "ms", ms["ours"], "ms", ms["dense"], ratio)
