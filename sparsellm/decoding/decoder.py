"""A model as a step for one token of each sequence: what it reads, and whether a model has it.

Shapes: M sequences, one token each; K hidden_size; V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsellm.decoding import token_kernels, token_math
from sparsellm.decoding.kv_cache import LayerCache, Positions
from sparsellm.decoding.token_math import Heads
from sparsellm.ffn.inference_path.linears import is_fp8, quantised_weight
from sparsellm.ffn.inference_path.replace import is_replaced
from sparsellm.ffn.kernels import linear as linear_kernels
from sparsellm.ffn.kernels.compiler.gpu_architecture import has_kernels
from sparsellm.ffn.types import Linear
from sparsellm.recipe.families import ARCHITECTURES

_MODEL_CLASSES = {architecture.model_class for architecture in ARCHITECTURES.values()}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class _Norm:
    weight_K: Tensor
    epsilon: float


@dataclass(frozen=True)
class _Layer:
    attention_norm: _Norm
    qkv: tuple[Linear, ...]
    heads: Heads
    output: Linear
    ffn_norm: _Norm
    ffn: nn.Module


class Decoder:
    """The step of a model that `why_no_step` has nothing against; it reads the model's weights."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = [_layer_of(layer) for layer in model.model.layers]
        self._norm = _norm_of(model.model.norm)
        self._head = _linear_of(model.lm_head)

    def empty_caches(self, num_sequences: int, capacity: int) -> list[LayerCache]:
        """Memory for the keys and values of every layer."""
        like = self._model.model.embed_tokens.weight
        shapes = [
            (num_sequences, layer.heads.num_keys, capacity, layer.heads.size)
            for layer in self.layers
        ]
        return [LayerCache.empty(shape, like) for shape in shapes]

    def rotary(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of RoPE, (P, D) each, for every position."""
        like = self._model.model.embed_tokens.weight
        position_1P = torch.arange(capacity, device=like.device)[None]
        cos_1PD, sin_1PD = self._model.model.rotary_emb(like[:1, None], position_1P)
        return cos_1PD[0].contiguous(), sin_1PD[0].contiguous()

    def logits(self, token_M: Tensor, caches: list[LayerCache], at: Positions) -> Tensor:
        """(M, V) for the tokens after these; their keys and values are written to the caches."""
        h_MK, y_MK = F.embedding(token_M, self._model.model.embed_tokens.weight), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x_MK = _residual_norm(h_MK, y_MK, layer.attention_norm)
            attended_MN = _attend(_linears(x_MK, layer.qkv), layer.heads, cache, at)
            x_MK = _residual_norm(h_MK, _linears(attended_MN, (layer.output,)), layer.ffn_norm)
            y_MK = layer.ffn(x_MK[:, None])[:, 0]
        return _linears(_residual_norm(h_MK, y_MK, self._norm), (self._head,))


def _residual_norm(h_MK: Tensor, y_MK: Tensor | None, norm: _Norm) -> Tensor:
    takes = has_kernels(h_MK) and h_MK.shape[1] % 8 == 0
    compute = token_kernels.residual_norm if takes else token_math.residual_norm
    return compute(h_MK, y_MK, norm.weight_K, norm.epsilon)


def _linears(x_MK: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    takes = linear_kernels.takes(x_MK, linears)
    return (linear_kernels if takes else token_math).linears(x_MK, linears)


def _attend(qkv_MN: Tensor, heads: Heads, cache: LayerCache, at: Positions) -> Tensor:
    takes = has_kernels(qkv_MN) and heads.size in token_kernels.HEAD_SIZES
    return (token_kernels.attend if takes else token_math.attend)(qkv_MN, heads, cache, at)


def _layer_of(layer: Any) -> _Layer:
    attention = layer.self_attn
    size = attention.head_dim
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    qkv = tuple(_linear_of(getattr(attention, name)) for name in _PROJECTIONS[:3])
    heads = Heads(
        num=attention.q_proj.out_features // size,
        num_keys=attention.k_proj.out_features // size,
        size=size,
        scaling=attention.scaling,
        rotates=bool(getattr(attention, "use_rope", True)),
        window=_window_of(attention) or 0,
        q_norm_D=None if q_norm is None else q_norm.weight,
        k_norm_D=None if k_norm is None else k_norm.weight,
        epsilon=0.0 if q_norm is None else q_norm.variance_epsilon,
    )
    return _Layer(
        attention_norm=_norm_of(layer.input_layernorm),
        qkv=qkv,
        heads=heads,
        output=_linear_of(attention.o_proj),
        ffn_norm=_norm_of(layer.post_attention_layernorm),
        ffn=layer.mlp,
    )


def _window_of(attention: Any) -> int | None:
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    # Mistral's layers read it from the configuration; Llama and Arcee have none.
    return getattr(attention.config, "sliding_window", None)


def _norm_of(norm: Any) -> _Norm:
    return _Norm(norm.weight, norm.variance_epsilon)


def _linear_of(linear: nn.Linear) -> Linear:
    return Linear(linear.weight, linear.bias, quantised_weight(linear))


def why_no_step(model: Any) -> str | None:
    """Why a model cannot decode by `Decoder`, or None."""
    if type(model).__name__ not in _MODEL_CLASSES:
        return f"{type(model).__name__} is none of {', '.join(sorted(_MODEL_CLASSES))}"
    # In FP8 weights that are not read are on the CPU. Other models with some there have hooks.
    if len({p.device for p in model.parameters() if p.device.type != "cpu"}) > 1:
        return "its weights are on several devices"
    rope = model.model.rotary_emb.rope_type
    if "dynamic" in rope or rope == "longrope":
        return f"its RoPE ({rope}) depends on the length of the text"
    if model.training:
        return "it is in training mode"
    for name, module in _modules(model):
        if reason := _why_changed(module):
            return f"{name}: {reason}"
    return None


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a step computes itself, or calls as a whole."""
    yield "lm_head", model.lm_head
    yield "model.norm", model.model.norm
    for index, layer in enumerate(model.model.layers):
        for name, module in layer.named_modules():
            if not name.startswith("mlp."):
                yield f"model.layers.{index}.{name}".rstrip("."), module


def _why_changed(module: nn.Module) -> str | None:
    """Why a module may compute something else than its class does."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks"
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}"
    if "forward" in vars(module) and not is_fp8(module) and not is_replaced(module):
        return "its forward was replaced"
    return None
