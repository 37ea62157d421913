"""Cross-entropy of a large vocabulary: materialised logits (compiled) against Liger's fused one.

`ratio` is torch over Liger: above 1 Liger is better. Both sides alternate in one process on the
same inputs; times are medians.

Shapes: M tokens, C hidden_size, V vocab_size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsellm.bench import memory, timing
from sparsellm.bench.ffn_sides import relative_difference
from sparsellm.bench.record import Measurement
from sparsellm.recipe_sections import RuntimeConfig
from sparsellm.training.objective import LossFunction, build_loss

_WARM_UP = 5
_SECONDS = 2.0  # of timing


def run(tokens: int, hidden_size: int, vocab_size: int, device: torch.device) -> list[Measurement]:
    """Forward + backward ms and peak MiB above the inputs, both implementations.

    Args:
        tokens: M, the tokens of a micro-batch.
        hidden_size: C, the hidden size.
        vocab_size: V, the padded vocabulary size.
        device: a CUDA device.

    Raises:
        ValueError: Liger is not installed.
    """
    torch.manual_seed(0)
    x_MC = torch.randn(tokens, hidden_size, device=device, dtype=torch.bfloat16)
    w_VC = torch.randn(vocab_size, hidden_size, device=device) * 0.02
    targets_M = torch.randint(vocab_size, (tokens,), device=device)
    steps = {
        name: partial(_step, build_loss(RuntimeConfig(loss=name)), x_MC, w_VC, targets_M)
        for name in ("torch", "liger")
    }
    for _ in range(_WARM_UP):
        for step in steps.values():
            step()
    ms = timing.interleaved({name: [step] for name, step in steps.items()}, _SECONDS)
    mib = {name: memory.peak_mib(step) for name, step in steps.items()}
    exact, fused = (step() for step in steps.values())
    case: dict[str, Any] = {"tokens": tokens, "hidden_size": hidden_size, "vocab_size": vocab_size}
    case |= {"loss": "liger", "precision": "bf16 autocast, fp32 weight"}
    return [
        Measurement("loss", case, metric, of["liger"], unit, of["torch"], of["torch"] / of["liger"])
        for metric, of, unit in (("fwd_bwd", ms, "ms"), ("peak_memory", mib, "MiB"))
    ] + [
        Measurement(
            "loss", case, f"difference_{what}", relative_difference(a, b), "relative to torch"
        )
        for what, a, b in zip(("loss", "grad_x", "grad_w"), fused, exact, strict=True)
    ]


def _step(loss: LossFunction, x_MC: Tensor, w_VC: Tensor, targets_M: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the mean loss and the gradients of x and of the weight."""
    x_MC, w_VC = x_MC.detach().requires_grad_(), w_VC.detach().requires_grad_()
    with torch.autocast(x_MC.device.type, torch.bfloat16):
        value = loss(x_MC, w_VC, targets_M) / len(targets_M)
    return value.detach(), *torch.autograd.grad(value, (x_MC, w_VC))
