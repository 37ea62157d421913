"""Cross-entropy of a large vocabulary: materialised logits (compiled) against Liger's fused one.

`ratio` is torch over Liger: above 1 Liger is better. Both sides run on the same inputs in the
same process; times are medians of CUDA-event timings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsellm.bench import memory
from sparsellm.bench.record import Measurement
from sparsellm.recipe_sections import RuntimeConfig
from sparsellm.training.objective import build_loss


def run(tokens: int, hidden_size: int, vocab_size: int) -> list[Measurement]:
    """Forward + backward ms and peak MiB above the inputs, both implementations.

    Args:
        tokens: M, the tokens of a micro-batch.
        hidden_size: C, the hidden size.
        vocab_size: V, the padded vocabulary size.

    Raises:
        ValueError: no CUDA device, or Liger is not installed.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench loss measures GPU kernels and needs a CUDA device")
    torch.manual_seed(0)
    device = "cuda"
    x_MC = torch.randn(tokens, hidden_size, device=device, dtype=torch.bfloat16)
    w_VC = torch.randn(vocab_size, hidden_size, device=device) * 0.02
    targets_M = torch.randint(vocab_size, (tokens,), device=device)
    measured = {}
    for name in ("torch", "liger"):
        loss = build_loss(RuntimeConfig(loss=name))

        def step(
            loss: Callable[[Tensor, Tensor, Tensor], Tensor] = loss,
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            x, w = x_MC.detach().requires_grad_(), w_VC.detach().requires_grad_()
            with torch.autocast(device, torch.bfloat16):
                value = loss(x, w, targets_M)
            (value / tokens).backward()
            return value.detach(), x.grad, w.grad

        measured[name] = (_median_ms(step), memory.peak_mib(step), step())
    (torch_ms, torch_mib, exact), (liger_ms, liger_mib, fused) = measured.values()
    case: dict[str, Any] = {"tokens": tokens, "hidden_size": hidden_size, "vocab_size": vocab_size}
    case |= {"loss": "liger", "precision": "bf16 autocast, fp32 weight"}
    pairs = zip(exact, fused, strict=True)
    errors = [_relative(a, b) for a, b in pairs]
    return [
        Measurement("loss", case, "fwd_bwd", liger_ms, "ms", torch_ms, torch_ms / liger_ms),
        Measurement(
            "loss", case, "peak_memory", liger_mib, "MiB", torch_mib, torch_mib / liger_mib
        ),
        *(
            Measurement("loss", case, f"difference_{what}", error, "relative to torch")
            for what, error in zip(("loss", "grad_x", "grad_w"), errors, strict=True)
        ),
    ]


def _relative(exact: Tensor | None, other: Tensor | None) -> float:
    assert exact is not None
    assert other is not None
    return float((other - exact).float().norm() / exact.float().norm())


def _median_ms(step: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(5):
        step()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]
