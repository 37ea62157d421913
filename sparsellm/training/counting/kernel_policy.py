"""Which kernels FFNs may train with: set up before the first step, saved and restored.

Under ``auto`` the costs of the dense and the sparse kernels are measured once on every rank and
averaged. Between steps each layer chooses by these costs and by counts that all ranks share
(`SparseFFN.update_kernels`).
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from sparsellm.device import refuse_sparse_without_gpu
from sparsellm.ffn.dispatch import SPARSE_BELOW, Costs, Measured
from sparsellm.ffn.kernels.compiler.compile_ahead import compile_ahead
from sparsellm.ffn.kernels.compiler.gpu_architecture import device_name, why_no_kernels
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import Ramp
from sparsellm.recipe import Recipe
from sparsellm.sparsity.kernel_choice import mean_costs, reason_against_kernels
from sparsellm.sparsity.over_ranks import any_rank


def set_up_kernels(recipe: Recipe, ffns: list[SparseFFN], device: torch.device) -> str | None:
    """Sets up the kernels that ``ffn.kernels`` names; all ranks must call it.

    Returns:
        Why ``auto`` is dense on this GPU, if it is dense.

    Raises:
        ValueError: ``sparse`` is not supported here; the message says why.
    """
    kernels, costs, reason = recipe.ffn.kernels, None, None
    if kernels == "sparse":
        refuse_sparse_without_gpu("ffn.kernels: sparse", device, "set ffn.kernels=auto")
    if device.type == "cuda" and kernels != "dense" and recipe.activation.kernels:
        reason = unsupported_reason(recipe, device)
        if any_rank(reason is not None, device):
            reason = reason or "another rank cannot run the sparse kernels"
        elif kernels == "auto":
            costs = _measure_costs(recipe, device)
    if reason and kernels == "sparse":
        raise ValueError(f"ffn.kernels: sparse: {reason}; or set ffn.kernels=dense")
    for ffn in ffns:
        ffn.use_format(recipe.ffn.format, recipe.ffn.ell_width)
        ffn.use_kernels(kernels, costs)
    return reason


def compile_kernels_ahead(recipe: Recipe, device: torch.device) -> None:
    """Starts to compile the kernels that `set_up_kernels` and Muon will need, if any."""
    if device.type != "cuda" or why_no_kernels(device) is not None:
        return
    may_be_sparse = recipe.ffn.kernels != "dense" and recipe.activation.kernels
    sparse = may_be_sparse and unsupported_reason(recipe, device) is None
    further = ["muon", "transpose"] if recipe.optimizer.name == "muon" else []
    if sparse or further:
        compile_ahead(
            recipe.ffn.format if sparse else None,
            torch.empty(0, device=device).get_device(),
            recipe.ffn.activation,
            fp8=recipe.runtime.precision == "fp8",
            further=further,
        )


def unsupported_reason(recipe: Recipe, device: torch.device) -> str | None:
    if recipe.runtime.precision == "fp32":
        return "the sparse kernels need runtime.precision=bf16 or fp8"
    shape = recipe.model
    return reason_against_kernels(shape.hidden_size, shape.intermediate_size, device)


def _measure_costs(recipe: Recipe, device: torch.device) -> Costs:
    """The costs of a micro-batch's forward and backward pass: their mean over all ranks."""
    shape = recipe.model
    call = Measured(
        recipe.micro_batch_tokens,
        shape.hidden_size,
        shape.intermediate_size,
        recipe.ffn.gated,
        recipe.ffn.format,
        torch.empty(0, device=device).get_device(),
        fp8=recipe.runtime.precision == "fp8",
    )
    ordered = recipe.runtime.token_order == "auto"
    return mean_costs(call, device, compiled=recipe.runtime.compile, ordered=ordered)


def described_costs(ffns: list[SparseFFN]) -> str | None:
    """A line on what ``auto`` measured and when it chooses sparse; None if it cannot choose."""
    costs, num_neurons = ffns[0].costs, ffns[0].up_proj.out_features
    if ffns[0].kernels != "auto" or costs is None:
        return None
    most = (SPARSE_BELOW * costs.dense - costs.fixed) / max(costs.per_neuron, 1e-12)
    chosen = (
        "sparse once the neurons active for at least one of 64 tokens are fewer than "
        f"{min(most, num_neurons):,.0f} of {num_neurons:,}"
        if most >= 1
        else "dense at every density here"
    )
    return (
        f"ffn.kernels: auto: a layer's forward and backward pass takes {costs.dense:.2f} ms dense, "
        f"and {costs.fixed:.2f} ms sparse if no neuron is active; it runs {chosen}"
    )


def each_path(ffns: list[SparseFFN], ramp: Ramp | None = None) -> Iterator[None]:
    """Iterates over the paths that the FFNs may take, then restores their own.

    Args:
        ffns: of each layer, on no ramp.
        ramp: for a path with this mixture of activations; None: there is none.
    """
    yield
    free = [ffn for ffn in ffns if ffn.kernels == "auto" and ffn.costs is not None]
    paths = [ffn.path for ffn in free]
    for ffn in free:
        ffn.path = "sparse"
    if free:
        yield
    for ffn, path in zip(free, paths, strict=True):
        ffn.path = path
    if ramp is None:
        return
    paths = [ffn.path for ffn in ffns]
    for ffn in ffns:
        ffn.use_ramp(ramp)
    yield
    for ffn, path in zip(ffns, paths, strict=True):
        ffn.use_ramp(None)
        ffn.path = path


def kernels_state(ffns: list[SparseFFN], device: torch.device) -> dict[str, Any]:
    """What a resumed run needs to make the same choices: plain values, the same on all ranks."""
    costs = ffns[0].costs
    return {
        "device": device_name(device),
        "format": ffns[0].format,
        "costs": None if costs is None else asdict(costs),
        "paths": [ffn.path for ffn in ffns],
    }


def restore_kernels(
    ffns: list[SparseFFN], state: dict[str, Any] | None, device: torch.device
) -> None:
    """Restores `kernels_state`, if ``ffn.kernels`` is ``auto`` and the GPU model is the same."""
    if not state or not state["costs"] or state["device"] != device_name(device):
        return
    if state["format"] != ffns[0].format:  # the costs are of another format
        return
    for ffn, path in zip(ffns, state["paths"], strict=True):
        if ffn.kernels == "auto" and ffn.costs is not None:
            ffn.use_kernels("auto", Costs(**state["costs"]))
            ffn.path = path
