"""RMSNorm, RoPE and linear layers of a block: as training computes them, and by fused kernels.

`ratio` is torch over the other side: above 1 the other side is better. Sides alternate in one
process on the same inputs; times are medians, each call queued behind other work, so that the
host's time is not what is measured. `copy_rate` is the bytes that must be moved at least, per
second, over the rate of a large copy on the same GPU: 1 is the bound.

The operations, with the activations in bf16 and the weight in fp32 as under autocast:

- ``norm``: (M, K) → (M, K), as before attention and before the head.
- ``add_norm``: the addition to the residual stream and the norm before a dense FFN.
- ``add_norm_ordered``: the same before a sparse FFN, written in token order.
- ``rope``: of queries and keys.
- ``linear``: a (K, K) layer of attention in one of a step's micro-batches, whose gradient is added
  to that of earlier ones; three matrix products, so without `copy_rate`.
- ``linear_up`` and ``linear_down``: the same of a dense FFN's (N, K) and (K, N).

The sides: ``torch`` is compiled as in training; ``two_reductions`` the same without Inductor's
fusion of a norm's two backward reductions (torch 2.10 and newer); ``liger`` is Liger's RoPE.
Liger's RMSNorm was slower in compiled blocks and is not measured any more: benchmarks/LOG.md.
Of a linear layer, ``torch`` casts the weight, and the gradient from bf16 before autograd adds it;
``addmm`` is `runtime.weight_gradients: fused`: the weight is cast before (once a step), and the
matrix product adds the gradient in fp32.

Shapes: M tokens, K hidden_size, N intermediate_size, B sequences, T context_length, H heads,
D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from sparsellm.bench import timing
from sparsellm.bench.ffn_sides import relative_difference
from sparsellm.bench.record import Measurement
from sparsellm.device import check_liger
from sparsellm.ffn.fills import Fills
from sparsellm.ffn.shared_linear import SharedLinear
from sparsellm.ffn.token_order import in_order
from sparsellm.ffn.types import TokenOrder

EPS = 1e-5
_WARM_UP = 3

Outputs = tuple[Tensor, ...]


class Implementation(NamedTuple):
    """One implementation."""

    forward: Callable[..., Outputs]
    weights: list[Tensor]  # its own, of equal values


class Operation(NamedTuple):
    """An operation with its inputs."""

    inputs: list[Tensor]
    d_outputs: Outputs
    num_bytes: int  # that forward and backward must move: each input and output once
    sides: dict[str, Implementation]

    def step(self, name: str) -> Outputs:
        """Forward and backward of a side: outputs, and gradients of inputs and weights."""
        forward, weights = self.sides[name]
        outputs = forward(*self.inputs)
        gradients = torch.autograd.grad(outputs, [*self.inputs, *weights], self.d_outputs)
        return (*(output.detach() for output in outputs), *gradients)


class LinearLayer(NamedTuple):
    """A linear layer with a micro-batch."""

    x: Tensor
    dy: Tensor
    sides: dict[str, tuple[SharedLinear, Callable[[Tensor], Tensor]]]  # of equal weights

    def step(self, name: str) -> Outputs:
        """Forward and backward of a side: y, the gradient of x, and the weight's, added up."""
        linear, forward = self.sides[name]
        self.x.grad = None
        with torch.autocast(self.x.device.type, torch.bfloat16):
            y = forward(self.x)
        y.backward(self.dy)
        assert self.x.grad is not None
        assert linear.weight.grad is not None
        return y.detach(), self.x.grad, linear.weight.grad


def run(
    sequences: Sequence[int],
    *,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    context_length: int,
    device: torch.device,
    seconds: float,
) -> Iterator[list[Measurement]]:
    """Measures each operation at each number of sequences; each yielded result is final.

    Args:
        sequences: B, of a micro-batch.
        hidden_size: K.
        intermediate_size: N.
        num_heads: H, of queries and of keys.
        context_length: T.
        device: a CUDA device.
        seconds: seconds of timing per operation.
    """
    rate = timing.ceilings(device).gbytes_per_s
    lead = timing.other_work(device)
    for batch in sequences:
        tokens = batch * context_length
        made = operations(batch, context_length, hidden_size, intermediate_size, num_heads, device)
        for name, operation in made:
            case: dict[str, Any] = {"operation": name, "M": tokens, "K": hidden_size}
            if name == "rope":
                case |= {"heads": num_heads}
            if name in ("linear_up", "linear_down"):
                case |= {"N": intermediate_size}
            yield _measured(operation, case, seconds, rate, lead)


def _measured(
    operation: Operation | LinearLayer,
    case: dict[str, Any],
    seconds: float,
    rate: float,
    lead: timing.Call,
) -> list[Measurement]:
    # Liger's RoPE overwrites its inputs: torch, the first side, has read them before.
    results = {name: operation.step(name) for name in operation.sides}
    differences = {
        name: max(map(relative_difference, result, results["torch"]))
        for name, result in results.items()
    }
    for _ in range(_WARM_UP):
        for name in operation.sides:
            operation.step(name)
    calls = {name: [partial(operation.step, name)] for name in operation.sides}
    ms, found = timing.interleaved(calls, seconds, lead), []
    for name in operation.sides:
        own, other = case | {"side": name}, name != "torch"
        baseline = (ms["torch"], ms["torch"] / ms[name]) if other else (None, None)
        found.append(Measurement("block", own, "forward_backward", ms[name], "ms", *baseline))
        if isinstance(operation, Operation):
            share = operation.num_bytes / ms[name] / 1e6 / rate
            found.append(Measurement("block", own, "copy_rate", share, "of a large copy's"))
        if other:
            unit = "relative to torch, largest of outputs and gradients"
            found.append(Measurement("block", own, "difference", differences[name], unit))
    return found


def operations(  # noqa: PLR0917
    batch: int,
    context_length: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    device: torch.device,
) -> Iterator[tuple[str, Operation | LinearLayer]]:
    """The operations by name, made one after the other."""
    tokens = batch * context_length
    generator = torch.Generator(device).manual_seed(0)

    def matrix(width: int = hidden_size) -> Tensor:
        shape = (tokens, width)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    num_bytes = 2 * tokens * hidden_size  # of one activation

    def norm_operation(
        function: Callable[..., Outputs], num_inputs: int, num_tensors: int
    ) -> Operation:
        # Dynamo counts the graphs of a function; beyond a limit it would run it uncompiled.
        torch._dynamo.reset()
        inputs = [matrix().requires_grad_() for _ in range(num_inputs)]
        d_outputs = tuple(matrix() for _ in range(num_inputs))
        sides = {
            name: Implementation(_compiled(partial(function, norm), name), [norm.weight])
            for name, norm in _norms(hidden_size, device).items()
        }
        return Operation(inputs, d_outputs, num_tensors * num_bytes, sides)

    yield "norm", norm_operation(_norm, 1, num_tensors=5)
    yield "add_norm", norm_operation(_add_norm, 2, num_tensors=8)
    row_M = torch.randperm(tokens, generator=generator, device=device)
    order = TokenOrder(row_M.argsort().int(), row_M)
    yield "add_norm_ordered", norm_operation(partial(_add_norm, order=order), 2, num_tensors=8)

    shape = (batch, context_length, num_heads, hidden_size // num_heads)
    inputs = [matrix().view(shape).requires_grad_() for _ in range(2)]
    d_outputs = tuple(matrix().view(shape).transpose(1, 2) for _ in range(2))
    rotary = _rotary(context_length, shape[-1], device)
    torch._dynamo.reset()
    sides = {"torch": Implementation(_compiled(partial(_rope, rotary), "torch"), [])}
    if _has_liger():
        sides["liger"] = Implementation(partial(_liger_rope, rotary), [])
    yield "rope", Operation(inputs, d_outputs, 8 * num_bytes, sides)

    for name, num_in, num_out in (
        ("linear", hidden_size, hidden_size),
        ("linear_up", hidden_size, intermediate_size),
        ("linear_down", intermediate_size, hidden_size),
    ):
        torch._dynamo.reset()
        weight = torch.randn(num_out, num_in, generator=generator, device=device) / num_in**0.5
        layers = {"torch": SharedLinear(nn.Parameter(weight.clone()))}
        layers["addmm"] = SharedLinear(nn.Parameter(weight))
        with Fills() as fills:
            layers["addmm"].begin_step(torch.bfloat16, accumulate=True, fills=fills)
        compiled = {own: (layer, _compiled(layer.forward, own)) for own, layer in layers.items()}
        yield name, LinearLayer(matrix(num_in).requires_grad_(), matrix(num_out), compiled)


def _norms(hidden_size: int, device: torch.device) -> dict[str, Any]:
    norms = {"torch": LlamaRMSNorm(hidden_size, EPS)}
    if _can_split_reductions():
        norms["two_reductions"] = LlamaRMSNorm(hidden_size, EPS)
    return {name: norm.to(device) for name, norm in norms.items()}


def _has_liger() -> bool:
    try:
        check_liger("liger")
    except ValueError:
        return False
    return True


def _can_split_reductions() -> bool:
    from torch._inductor import config

    return getattr(config.triton, "mix_order_reduction", False)


def _compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    options: dict[str, Any] = {"triton.mix_order_reduction": False}
    split = options if name == "two_reductions" else None
    return torch.compile(function, dynamic=False, options=split)


def _norm(norm: Any, x_MK: Tensor) -> Outputs:
    # Autocast casts the fp32 result for the matrix product that follows.
    return (norm(x_MK).to(x_MK.dtype),)


def _add_norm(
    norm: Any, residual_MK: Tensor, attended_MK: Tensor, order: TokenOrder | None = None
) -> Outputs:
    sum_MK = residual_MK + attended_MK
    normed_MK = norm(sum_MK).to(sum_MK.dtype)
    return sum_MK, normed_MK if order is None else in_order(normed_MK, order)


def _rotary(context_length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine (1, T, D) in bf16, as `LlamaRotaryEmbedding` makes them."""
    frequencies = 1e4 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(context_length, device=device)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[None]
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _rope(rotary: tuple[Tensor, Tensor], q_BTHD: Tensor, k_BTHD: Tensor) -> Outputs:
    found: Outputs = apply_rotary_pos_emb(q_BTHD.transpose(1, 2), k_BTHD.transpose(1, 2), *rotary)
    return found


def _liger_rope(rotary: tuple[Tensor, Tensor], q_BTHD: Tensor, k_BTHD: Tensor) -> Outputs:
    """Overwrites queries and keys, and in the backward pass their gradients."""
    from liger_kernel.ops.rope import LigerRopeFunction

    found: Outputs = LigerRopeFunction.apply(
        q_BTHD.transpose(1, 2), k_BTHD.transpose(1, 2), *rotary
    )
    return found
