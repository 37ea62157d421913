"""Whether FFNs may train with the sparse kernels here, and what a training pass costs with them.

Shapes: K hidden_size, N intermediate_size.
"""

from dataclasses import astuple

import torch
import torch.distributed as dist

from sparsellm.ffn.dispatch import Costs, Measured
from sparsellm.ffn.inference_ops import beyond_limits
from sparsellm.ffn.inference_path.discover import Projections
from sparsellm.sparsity.over_ranks import Group, all_reduce_sum


def reason_against_kernels(k: int, n: int, device: torch.device) -> str | None:
    """Why a GPU cannot train FFNs of this shape with the sparse kernels; None if it can."""
    from sparsellm.ffn.kernels.compiler.gpu_architecture import why_no_kernels

    return why_no_kernels(device) or beyond_limits(k, n)


def mean_costs(
    call: Measured,
    device: torch.device,
    *,
    compiled: bool,
    ordered: bool,
    projections: Projections | None = None,
    group: Group = None,
) -> Costs:
    """The costs of a micro-batch's forward and backward pass: their mean over ranks.

    All ranks must call it; each waits for its GPU.

    Args:
        call: shape of the FFN, and number of tokens.
        device: of this rank.
        compiled, ordered: see `ffn.costs.measure_training_costs`.
        projections: the linear layers (gate, up, down) of the dense path; None: our own loop's.
        group: the ranks.
    """
    from sparsellm.ffn.costs import LinearLayers, measure_training_costs

    linears = None if projections is None else LinearLayers.like(projections)
    costs = measure_training_costs(call, compiled=compiled, ordered=ordered, linears=linears)
    mean = torch.tensor(astuple(costs), dtype=torch.float64, device=device)
    if dist.is_initialized():
        all_reduce_sum(mean, group)
        mean /= dist.get_world_size(group)
    return Costs(*mean.tolist())
