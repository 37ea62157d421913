"""`sparsellm.accelerate`: the sparse kernels under any Hugging Face model with ReLU FFNs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsellm.ffn.dispatch import Dispatch, Kernels, Path, new_dispatch
from sparsellm.ffn.inference_ops import beyond_limits, sparse_ffn
from sparsellm.ffn.module import SparseFFN
from sparsellm.ffn.types import FFNWeights

DOWN_NK, INSTALLED = "sparsellm_down_NK", "sparsellm_installed"
OLDEST = (8, 0)  # compute capability: bf16 in tensor cores, cp.async
# With so few tokens and weights no larger the host decides the time of a dense FFN: an H200 reads
# 256 MiB in 65 µs, which is what it takes to queue the operator.
FEW_TOKENS, LARGE_BYTES = 64, 2**28


@dataclass
class Acceleration:
    """What `accelerate` did, by module name."""

    accelerated: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)  # name → why
    dispatches: dict[str, Dispatch] = field(default_factory=dict, repr=False)

    def paths(self) -> dict[str, dict[int, Path]]:
        """What each FFN runs now, by the largest number of tokens that it stands for."""
        return {name: dispatch.paths() for name, dispatch in self.dispatches.items()}

    def __str__(self) -> str:
        lines = [f"{len(self.accelerated)} FFNs accelerated"]
        lines += [f"left alone: {name}: {why}" for name, why in self.left_alone.items()]
        return "\n".join(lines)


def accelerate(model: nn.Module, threshold: float = 0.0, kernels: Kernels = "auto") -> Acceleration:
    """Puts the sparse kernels under every FFN of gate/up/down or up/down with ReLU, in place.

    For inference: change a weight afterwards and the model must be accelerated again. Parameters
    and state dict stay as they are; W_d is copied once, transposed.

    Args:
        model: such as Llama, Mistral, Qwen2, Qwen3 or Arcee from transformers, in bf16 on its GPU.
        threshold: FATReLU's; gates that are not above it count as zero. 0 changes nothing.
        kernels: ``auto`` runs a layer dense where measurement says that its present density makes
            that faster, so the last bits of a result may change from call to call; ``sparse`` and
            ``dense`` never choose, and repeat to the bit.

    Returns:
        What was accelerated, and what was left alone and why.

    Raises:
        ValueError: a negative threshold, an unknown ``kernels``.
    """
    if threshold < 0:
        raise ValueError(f"threshold {threshold} must not be negative")
    restore(model)
    done = Acceleration()
    for name, module in model.named_modules():
        ffn = _projections(module)
        if ffn is None:
            continue
        reason = _why_not(module, ffn)
        if reason:
            done.left_alone[name] = reason
        else:
            dispatch = new_dispatch(kernels, pinned=ffn.up.weight.is_cuda)
            _install(module, ffn, threshold, dispatch)
            done.accelerated.append(name)
            done.dispatches[name] = dispatch
    return done


def accelerate_whole(model: nn.Module, kernels: Kernels) -> Acceleration:
    """`accelerate` where it must not leave any FFN alone.

    Raises:
        ValueError: it would; which, and why.
    """
    done = accelerate(model, kernels=kernels)
    if done.left_alone or not done.accelerated:
        restore(model)
        why = [f"{name}: {reason}" for name, reason in done.left_alone.items()]
        raise ValueError(f"kernels {kernels}: {'; '.join(why) or 'no FFN in this model'}")
    return done


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`; nothing happens to a model that was not accelerated."""
    for module in model.modules():
        if DOWN_NK in module._buffers:
            delattr(module, DOWN_NK)
            own = vars(module)
            previous = own.pop(INSTALLED).previous
            del own["forward"]
            if previous is not None:
                own["forward"] = previous


class Projections(NamedTuple):
    """The matrices of an FFN."""

    gate: nn.Linear | None
    up: nn.Linear
    down: nn.Linear

    @property
    def present(self) -> list[nn.Linear]:
        """Those that there are."""
        return [linear for linear in self if linear is not None]


def _projections(module: nn.Module) -> Projections | None:
    children = module._modules  # not getattr: its search costs microseconds a call
    gate, up, down = children.get("gate_proj"), children.get("up_proj"), children.get("down_proj")
    if not isinstance(up, nn.Linear) or not isinstance(down, nn.Linear):
        return None
    return Projections(gate if isinstance(gate, nn.Linear) else None, up, down)


def _why_not(module: nn.Module, ffn: Projections) -> str | None:
    """Why an FFN cannot be served, or None."""
    k, n = ffn.up.in_features, ffn.up.out_features
    weight = ffn.up.weight
    dtypes = {linear.weight.dtype for linear in ffn.present}
    reason = None
    if not _has_relu(module):
        reason = "its activation is not ReLU"
    elif getattr(module, "gate_proj", None) is not None and ffn.gate is None:
        reason = "its gate is no nn.Linear"
    elif (ffn.down.in_features, ffn.down.out_features) != (n, k):
        reason = "its shapes are not those of an FFN"
    elif limit := beyond_limits(k, n):
        reason = limit
    elif dtypes != {torch.bfloat16}:
        reason = (
            f"its weights are {', '.join(map(str, sorted(dtypes, key=str)))}, not torch.bfloat16"
        )
    elif any(linear.weight.is_meta for linear in ffn.present):
        reason = "its weights are offloaded"
    elif len({linear.weight.device for linear in ffn.present}) > 1:
        reason = "its weights are on several devices"
    elif weight.is_cuda and torch.cuda.get_device_capability(weight.device) < OLDEST:
        reason = f"{torch.cuda.get_device_name(weight.device)} is older than Ampere"
    elif not all(linear.weight.is_contiguous() for linear in ffn.present):
        reason = "its weights are not contiguous"
    return reason


def _has_relu(module: nn.Module) -> bool:
    if isinstance(module, SparseFFN):
        return module.activation == "relu"
    # transformers: `act_fn`; others: `activation`, `act`.
    found = [getattr(module, name, None) for name in ("act_fn", "activation", "act")]
    return any(isinstance(value, nn.ReLU) for value in found)


@dataclass
class _Installed:
    """What `accelerate` put into a module beside its transposed W_d."""

    dispatch: Dispatch
    threshold: float
    previous: Callable[[Tensor], Tensor] | None  # a forward of the instance's own
    large: bool  # a GPU takes longer to read the weights than a host to queue the operator


def _install(module: nn.Module, ffn: Projections, threshold: float, dispatch: Dispatch) -> None:
    # A buffer moves with the module, and a non-persistent one is not saved with it.
    module.register_buffer(DOWN_NK, ffn.down.weight.detach().t().contiguous(), persistent=False)
    own = vars(module)
    num_bytes = sum(linear.weight.nbytes for linear in ffn.present)
    own[INSTALLED] = _Installed(dispatch, threshold, own.get("forward"), num_bytes > LARGE_BYTES)
    # A bound method, not a closure: a deep copy of the module then computes with its own weights.
    own["forward"] = MethodType(_forward, module)


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    installed: _Installed = module.__dict__[INSTALLED]
    ffn = _projections(module)
    assert ffn is not None
    trains = torch.is_grad_enabled() and (x.requires_grad or ffn.up.weight.requires_grad)
    if x.dtype != torch.bfloat16 or trains or x.numel() == 0:
        if installed.previous is not None:
            return installed.previous(x)
        y: Tensor = type(module).forward(module, x)
        return y
    gate_NK, b_gate_N = (None, None) if ffn.gate is None else _parameters(ffn.gate)
    up_NK, b_up_N = _parameters(ffn.up)
    down_KN, b_down_K = _parameters(ffn.down)
    w = FFNWeights(gate_NK, up_NK, down_KN, b_gate_N, b_up_N, b_down_K, installed.threshold)
    if _few_stay_dense(x, installed):
        return _few_dense(x, w)
    down_NK, handle = module._buffers[DOWN_NK], installed.dispatch.handle
    assert down_NK is not None
    if x.ndim == 2 and x.is_contiguous():
        return sparse_ffn(x, w, down_NK, handle)
    y_MK = sparse_ffn(x.reshape(-1, x.shape[-1]).contiguous(), w, down_NK, handle)
    return y_MK.view(x.shape)


def _parameters(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias: parameters are not searched for, which costs a microsecond each."""
    own = linear._parameters
    weight = own.get("weight")
    if weight is None:  # parametrized
        return linear.weight, linear.bias
    return weight, own["bias"]


def _few_stay_dense(x: Tensor, installed: _Installed) -> bool:
    """Whether a call is better done by `_few_dense` than by the operator.

    Not where the host does not matter, with large weights and while a CUDA graph is captured: the
    operator's dense path has one kernel where `_few_dense` has two.
    """
    num_tokens = x.numel() // x.shape[-1]
    return (
        num_tokens <= FEW_TOKENS
        and not installed.large
        and installed.threshold == 0
        and not torch.compiler.is_compiling()
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        and installed.dispatch.stays_dense(num_tokens)
    )


def _few_dense(x: Tensor, w: FFNWeights) -> Tensor:
    """By PyTorch's own operators: queued sooner than ours, which first checks its arguments."""
    up = F.linear(x, w.up_NK, w.b_up_N)
    h = F.relu(up) if w.gate_NK is None else F.relu(F.linear(x, w.gate_NK, w.b_gate_N)) * up
    return F.linear(h, w.down_KN, w.b_down_K)
