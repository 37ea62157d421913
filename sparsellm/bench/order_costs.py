"""What token order costs beside the FFN itself: the sort, and what the norm before it takes more.

The sort is done once for a micro-batch and serves all layers: each is charged its part. In training
the norm that makes the FFN's input writes it in order, and its backward reads the gradient through
the order (`token_order.in_order`): the residual's addition and the norm, as a block compiles them,
are timed with and without, and the difference is charged. M tokens, K hidden_size.
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
    """Of one `token_order`, behind other work: the host launches ahead."""
    sort = partial(token_order, ids_BT, vocab_size)
    for _ in range(_WARM_UP):
        sort()
    lead = timing.other_work(ids_BT.device)
    return timing.interleaved({"sort": [sort]}, seconds, lead)["sort"]


def norm_ms(order: TokenOrder, hidden_size: int, seconds: float) -> StepTimes:
    """What forward and backward of addition and norm take more in this order; 0 if less."""
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
    # As Llama's norm: fp32 inside, and autocast's bf16 for what follows.
    normed_MK = F.rms_norm(sum_MK.float(), sum_MK.shape[1:], eps=1e-5).to(sum_MK.dtype)
    normed_MK = (normed_MK * weight_K).to(sum_MK.dtype)
    return sum_MK, normed_MK if order is None else in_order(normed_MK, order)
