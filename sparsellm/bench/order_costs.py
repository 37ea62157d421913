"""The costs of token order outside the FFN: the sort, and the extra time of the norm before it.

The sort is done once per micro-batch for all layers: each layer is charged its share. In training
the norm that computes the FFN's input writes it in token order, and its backward reads the gradient
through the order (`token_order.in_order`). The residual addition and the norm, compiled as in a
block, are timed with and without token order, and the difference is charged. M tokens, K
hidden_size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.bench import timing
from sparsellm.bench.ffn_records import StepTimes
from sparsellm.ffn.token_order import in_order, token_order
from sparsellm.ffn.types import TokenOrder

_WARM_UP = 3


def sort_ms(ids_BT: Tensor, vocab_size: int, seconds: float) -> float:
    """Milliseconds of one `token_order`, queued behind other work, so the host launches ahead."""
    sort = partial(token_order, ids_BT, vocab_size)
    for _ in range(_WARM_UP):
        sort()
    lead = timing.other_work(ids_BT.device)
    return timing.interleaved({"sort": [sort]}, seconds, lead)["sort"]


def norm_ms(order: TokenOrder, hidden_size: int, seconds: float) -> StepTimes:
    """Extra milliseconds of addition and norm in this order, forward and backward; at least 0."""
    device, shape = order.token_M.device, (len(order.token_M), hidden_size)
    generator = torch.Generator(device).manual_seed(0)

    def matrix() -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    residual, attended, d_sum, d_normed = (matrix() for _ in range(4))
    weight = torch.ones(hidden_size, device=device)
    inputs = [t.requires_grad_() for t in (residual, attended, weight)]
    compiled = torch.compile(_sum_and_norm, dynamic=False)
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def forward(name: str, given: TokenOrder | None) -> None:
        kept[name] = compiled(*inputs, order=given)

    def backward(name: str, _: TokenOrder | None) -> None:
        torch.autograd.grad(kept.pop(name), inputs, (d_sum, d_normed))

    stages = {
        f"{name} {stage.__name__}": [partial(stage, name, given)]
        for name, given in (("natural", None), ("ordered", order))
        for stage in (forward, backward)
    }
    for _ in range(_WARM_UP):
        for (call,) in stages.values():
            call()
    ms = timing.interleaved(stages, seconds, timing.other_work(device))
    more = (
        max(ms[f"ordered {stage}"] - ms[f"natural {stage}"], 0.0)
        for stage in ("forward", "backward")
    )
    return StepTimes(*more)


def _sum_and_norm(
    residual_MK: Tensor, attended_MK: Tensor, weight_K: Tensor, *, order: TokenOrder | None
) -> tuple[Tensor, Tensor]:
    sum_MK = residual_MK + attended_MK
    # Like Llama's norm: fp32 internally, and bf16 output as under autocast.
    normed_MK = F.rms_norm(sum_MK.float(), sum_MK.shape[1:], eps=1e-5).to(sum_MK.dtype)
    normed_MK = (normed_MK * weight_K).to(sum_MK.dtype)
    return sum_MK, normed_MK if order is None else in_order(normed_MK, order)
