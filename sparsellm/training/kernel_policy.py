"""Which kernels FFNs may train with: set up before the first step, saved and restored.

Under ``auto`` the costs of the dense and the sparse kernels are measured once on every rank and
averaged. Between steps each layer chooses by these costs and by counts that all ranks share
(`SparseFFN.update_kernels`).
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import asdict, astuple
from typing import Any

import torch
import torch.distributed as dist

from sparsellm.device import device_name, refuse_sparse_without_gpu
from sparsellm.ffn.dispatch import RETURN, Costs, Measured
from sparsellm.ffn.inference_ops import beyond_limits
from sparsellm.ffn.module import SparseFFN
from sparsellm.ffn.types import Ramp
from sparsellm.paths import how_to_install_cuda
from sparsellm.processes.distributed import all_reduce_sum, any_rank
from sparsellm.recipe import Recipe


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


def unsupported_reason(recipe: Recipe, device: torch.device) -> str | None:
    from sparsellm.ffn.kernels.gpu_architecture import unsupported

    shape = recipe.model
    if recipe.runtime.precision == "fp32":
        return "the sparse kernels need runtime.precision=bf16 or fp8"
    if reason := unsupported(device):
        return reason
    if importlib.util.find_spec("cupy") is None:
        return f"the sparse kernels need CuPy: {how_to_install_cuda(torch.version.cuda)}"
    return beyond_limits(shape.hidden_size, shape.intermediate_size)


def _measure_costs(recipe: Recipe, device: torch.device) -> Costs:
    """The costs of a micro-batch's forward and backward pass: their mean over all ranks."""
    from sparsellm.ffn.costs import measure_training_costs

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
    own = measure_training_costs(call, compiled=recipe.runtime.compile, ordered=ordered)
    mean = torch.tensor(astuple(own), dtype=torch.float64, device=device)
    all_reduce_sum(mean)
    mean /= dist.get_world_size() if dist.is_initialized() else 1
    return Costs(*mean.tolist())


def described_costs(ffns: list[SparseFFN]) -> str | None:
    """A line on what ``auto`` measured and when it chooses sparse; None if it cannot choose."""
    costs, num_neurons = ffns[0].costs, ffns[0].up_proj.out_features
    if ffns[0].kernels != "auto" or costs is None:
        return None
    most = (RETURN * costs.dense - costs.fixed) / max(costs.per_neuron, 1e-12)
    chosen = (
        "sparse once the neurons that fire for at least one of 64 tokens are fewer than "
        f"{min(most, num_neurons):,.0f} of {num_neurons:,}"
        if most >= 1
        else "dense at every density here"
    )
    return (
        f"ffn.kernels: auto: a layer's forward and backward pass takes {costs.dense:.2f} ms dense, "
        f"and {costs.fixed:.2f} ms sparse if no neuron fires; it runs {chosen}"
    )


def each_path(ffns: list[SparseFFN], ramp: Ramp | None = None) -> Iterator[None]:
    """Iterates over the paths that the FFNs may take, then restores their own.

    Args:
        ffns: of each layer, on no ramp.
        ramp: for a path with this mixture of activations; None: there is none.
    """
    yield
    free = [ffn for ffn in ffns if ffn.kernels == "auto" and ffn.costs is not None]
    own = [ffn.path for ffn in free]
    for ffn in free:
        ffn.path = "sparse"
    if free:
        yield
    for ffn, path in zip(free, own, strict=True):
        ffn.path = path
    if ramp is None:
        return
    own = [ffn.path for ffn in ffns]
    for ffn in ffns:
        ffn.use_ramp(ramp)
    yield
    for ffn, path in zip(ffns, own, strict=True):
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
    if state.get("format", "union") != ffns[0].format:  # the costs are of another format
        return
    for ffn, path in zip(ffns, state["paths"], strict=True):
        if ffn.kernels == "auto" and ffn.costs is not None:
            ffn.use_kernels("auto", Costs(**state["costs"]))
            ffn.path = path
