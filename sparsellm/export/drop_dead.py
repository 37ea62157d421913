"""`sparsellm export --drop-dead`: neurons that are never active are left out of an export.

A neuron whose gate is zero on a token adds exactly zero to the FFN's output. One that was zero on
every measured token can be removed: on those tokens the outputs stay the same up to the order of
summation. On other text it might be active; the report bounds how often.

Silence is measured with the weights that are exported, in the type in which they are exported, on
held-out text. Training's own counters (counters.py) cannot be used: the weights changed during
their window, so a neuron that was silent then may be active now.

Hugging Face's format has one intermediate_size for all layers, so the layer with the most neurons
active on some token decides the width. L layers, N intermediate_size before, W after, M tokens, K
hidden_size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.analyze.activity import held_out_corpora, held_out_tokens, name_of, watch_ffns
from sparsellm.export.drop_report import DropReport, LayerReport
from sparsellm.ffn.activations import WITH_EXACT_ZEROS
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.recipe import Recipe
from sparsellm.recipe.estimate import count_parameters
from sparsellm.runs.huggingface.pretrained import Pretrained

DEFAULT_TOKENS = 1_048_576
WIDTH_MULTIPLE = 128  # neurons: whole GEMM tiles


@dataclass(frozen=True)
class DropDead:
    """The text to measure on, and the device."""

    tokens: int = DEFAULT_TOKENS  # in whole sequences
    files: list[str] | None = None  # globs of text; None reads the recipe's corpus
    micro_batch_size: int = 4  # sequences
    device: str | None = None  # None is a GPU if there is one


def drop_dead_neurons(
    pretrained: Pretrained, dtype: str, options: DropDead, earlier: DropReport | None = None
) -> tuple[Pretrained, DropReport]:
    """The model without its dead neurons, and a recipe of the new width.

    The model is narrowed in place, unless no layer's width can shrink: then all stays as it is
    and `DropReport.num_dropped` is 0.

    Args:
        pretrained: in the type that is exported, on the device that measures.
        dtype: that type's name in recipes, ``bf16`` or ``fp32``.
        options: which text, how much of it.
        earlier: of the export that wrote the model, if that dropped neurons too.

    Raises:
        FileNotFoundError: no such files.
        ValueError: no exact zeros, no held-out text can be read, or under one sequence of it.
    """
    recipe, model = pretrained.recipe, pretrained.model
    if not recipe.activation.exact_zeros:
        raise ValueError(
            f"--drop-dead needs {WITH_EXACT_ZEROS}; {recipe.name} has {recipe.ffn.activation}, "
            "whose activations are never exactly zero: no neuron is dead"
        )
    device = model.device
    corpora = held_out_corpora(recipe, options.files)
    batches = held_out_tokens(pretrained, corpora, options.tokens, options.micro_batch_size)
    peak_LN, num_tokens = peak_gates(pretrained, batches)
    remaining_LW = choose_remaining(peak_LN)
    width = remaining_LW.shape[1]
    narrow, target = _narrow_recipe(recipe, width), recipe.sparsity.target_nnz
    before, after = count_parameters(recipe).total, count_parameters(narrow).total
    report = DropReport(
        tokens=num_tokens,
        tokens_asked=options.tokens,
        context_length=recipe.model.context_length,
        corpus=name_of(corpora),
        files=options.files,
        dtype=dtype,
        device=str(device),
        intermediate_size_before=recipe.model.intermediate_size,
        intermediate_size=width,
        width_multiple=WIDTH_MULTIPLE,
        parameters_before=before,
        parameters_saved=before - after,
        bytes_saved=(before - after) * model.dtype.itemsize,
        target_nnz_left_out=None if narrow.sparsity.target_nnz == target else target,
        layers=[
            _layer_report(*pair, earlier.remaining(layer) if earlier else None)
            for layer, pair in enumerate(zip(peak_LN, remaining_LW, strict=True))
        ],
        earlier=earlier,
    )
    if report.num_dropped:
        for layer, remaining_W in zip(model.model.layers, remaining_LW.to(device), strict=True):
            _narrow(layer.mlp, remaining_W)
        model.config.intermediate_size = width
    return replace(pretrained, recipe=narrow), report


@torch.no_grad()
def peak_gates(pretrained: Pretrained, batches: Iterator[Tensor]) -> tuple[Tensor, int]:
    """Each neuron's highest pre-activation, (L, N) fp32 on the CPU, and M.

    It is that over all tokens and the beginning of a text. A neuron is active on some token if its
    peak is above zero, or NaN.
    """
    model = pretrained.model
    peaks: dict[int, Tensor] = {}

    def raise_peak(layer: int, x_MK: Tensor, w_NK: Tensor) -> None:
        peak_N = F.linear(x_MK, w_NK).amax(0).float()
        peaks[layer] = torch.maximum(peaks.get(layer, peak_N), peak_N)

    num_tokens = 0
    with watch_ffns(model, raise_peak):
        # All texts begin with it, also if those that are measured are one document without it.
        model.model(torch.tensor([pretrained.prompt_ids("")], device=model.device), use_cache=False)
        for batch_BT in batches:
            model.model(batch_BT.to(model.device), use_cache=False)
            num_tokens += batch_BT.numel()
    return torch.stack([peaks[layer] for layer in range(len(peaks))]).cpu(), num_tokens


def choose_remaining(peak_LN: Tensor) -> Tensor:
    """The neurons that stay, (L, W) int64, ascending in each layer; all of them if W = N.

    Those are all active ones, and to fill the common width the silent ones that came closest to
    it (the lowest number where several came equally close).
    """
    num_neurons = peak_LN.shape[1]
    most = int(_is_active(peak_LN).sum(1).max())
    multiples = max(-(-most // WIDTH_MULTIPLE), 1)
    width = min(multiples * WIDTH_MULTIPLE, num_neurons)
    # The active ones have the highest peaks.
    ranked_LN = peak_LN.nan_to_num(nan=torch.inf).argsort(dim=1, descending=True, stable=True)
    return ranked_LN[:, :width].sort(dim=1).values


def _is_active(peak: Tensor) -> Tensor:
    return ~(peak <= 0)  # NaN too


def _layer_report(peak_N: Tensor, remaining_W: Tensor, numbers: list[int] | None) -> LayerReport:
    """``numbers``: of the N neurons in the model as it was trained, if it had more."""
    is_dropped_N = torch.ones_like(peak_N, dtype=torch.bool).index_fill(0, remaining_W, False)
    dropped = is_dropped_N.nonzero()[:, 0].tolist()
    num_active = int(_is_active(peak_N).sum())
    nearest = float(peak_N[is_dropped_N].max()) if dropped else None
    return LayerReport(
        fired=num_active,
        silent=len(peak_N) - num_active,
        kept=len(remaining_W),
        nearest_dropped=nearest,
        dropped=[numbers[n] for n in dropped] if numbers else dropped,
    )


def _narrow_recipe(recipe: Recipe, width: int) -> Recipe:
    shape = recipe.model.model_copy(update={"intermediate_size": width})
    update: dict[str, Any] = {"model": shape}
    sparsity = recipe.sparsity
    without: dict[str, Any] = {}
    # No recipe may have a target of the width or more: all neurons may be active.
    if any(earlier >= width for _, earlier in sparsity.target_schedule):
        without = {"target_schedule": []}
    if sparsity.target_nnz is not None and sparsity.target_nnz >= width:
        without = {"target_nnz": None, "target_per_layer": False, "target_schedule": []}
    update["sparsity"] = sparsity.model_copy(update=without)
    return Recipe.model_validate(recipe.model_copy(update=update).model_dump())


def _narrow(ffn: SparseFFN, remaining_W: Tensor) -> None:
    for linear in [ffn.gate_proj, ffn.up_proj] if ffn.gated else [ffn.up_proj]:
        linear.weight.data = linear.weight.data.index_select(0, remaining_W)
        linear.out_features = len(remaining_W)
    ffn.down_proj.weight.data = ffn.down_proj.weight.data.index_select(1, remaining_W)
    ffn.down_proj.in_features = len(remaining_W)
