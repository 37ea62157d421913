"""A model's forward pass for prompts, and a step for one token of each sequence after them: what it
reads, and whether a model has it.

Shapes: M sequences of T tokens, R = M · T in all; T is 1 in a step. K hidden_size; V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsellm.decoding import token_kernels, token_math
from sparsellm.decoding.kv_cache import LayerCache, Positions
from sparsellm.decoding.prompt import Prompt
from sparsellm.decoding.token_math import Heads
from sparsellm.ffn.inference_path.linears import is_fp8, quantised_weight
from sparsellm.ffn.inference_path.replace import forget_order, is_replaced
from sparsellm.ffn.kernels import linear as linear_kernels
from sparsellm.ffn.kernels.compiler.gpu_architecture import has_kernels
from sparsellm.ffn.token_order import is_of_order
from sparsellm.ffn.types import Linear
from sparsellm.recipe.families import ARCHITECTURES

_MODEL_CLASSES = {architecture.model_class for architecture in ARCHITECTURES.values()}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# Modules of which a step reads the weight alone: by name, what they then are.
_PLAIN = dict.fromkeys((*_PROJECTIONS, "lm_head"), nn.Linear) | {"embed_tokens": nn.Embedding}


class _Norm(NamedTuple):
    weight_K: Tensor
    epsilon: float


class _Layer(NamedTuple):
    attention_norm: _Norm
    qkv: tuple[Linear, ...]
    heads: Heads
    output: Linear
    ffn_norm: _Norm
    ffn: nn.Module


class Decoder:
    """Computes a model that `why_no_step` has nothing against; it reads the model's weights."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = [_layer_of(layer) for layer in model.model.layers]
        self._norm = _norm_of(model.model.norm)
        self._head = _linear_of(model.lm_head)

    def empty_caches(self, num_sequences: int, capacity: int) -> list[LayerCache]:
        """Memory for the keys and values of every layer, in one allocation."""
        like = self._model.model.embed_tokens.weight
        heads = [layer.heads for layer in self.layers]
        shapes = [(2, num_sequences, h.num_keys, capacity, h.size) for h in heads]
        sizes = [math.prod(shape) for shape in shapes]
        memory = like.new_empty(sum(sizes))
        if not all(token_kernels.computes(like, h) for h in heads):
            # Where plain torch masks a position that is NaN, the sum over positions is still NaN.
            memory.zero_()
        parts = zip(memory.split(sizes), shapes, strict=True)
        return [LayerCache(*part.view(shape).unbind()) for part, shape in parts]

    def rotary(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of RoPE, (P, D) each, for every position."""
        like = self._model.model.embed_tokens.weight
        position_1P = torch.arange(capacity, device=like.device)[None]
        cos_1PD, sin_1PD = self._model.model.rotary_emb(like[:1, None], position_1P)
        return cos_1PD[0].contiguous(), sin_1PD[0].contiguous()

    def logits(self, token_M: Tensor, caches: list[LayerCache], at: Positions) -> Tensor:
        """(M, V) for the tokens after these; their keys and values are written to the caches."""

        def attend(x_MK: Tensor, layer: _Layer, cache: LayerCache) -> Tensor:
            return _attend(_linears(x_MK, layer.qkv), layer.heads, cache, at)

        h_MK = F.embedding(token_M, self._model.model.embed_tokens.weight)
        return self._logits(h_MK[:, None], caches, attend)

    def prompt_logits(self, token_MT: Tensor, caches: list[LayerCache], prompt: Prompt) -> Tensor:
        """(M, V) for the tokens after the prompts, whose keys and values fill the caches."""

        def attend(x_RK: Tensor, layer: _Layer, cache: LayerCache) -> Tensor:
            heads, (q_RN, k_RN, v_RN) = layer.heads, _products(x_RK, layer.qkv)
            if heads.q_norm_D is not None and heads.k_norm_D is not None:
                q_RN = _norm_heads(q_RN, _Norm(heads.q_norm_D, heads.epsilon))
                k_RN = _norm_heads(k_RN, _Norm(heads.k_norm_D, heads.epsilon))
            return prompt.attend(q_RN, k_RN, v_RN, heads, cache)

        # The module is called, since the order of the FFNs' tokens is computed by its hook.
        h_MTK = self._model.model.embed_tokens(token_MT)
        try:
            return self._logits(h_MTK, caches, attend)
        finally:
            forget_order(self.layers[0].ffn)

    def _logits(
        self,
        h_MTK: Tensor,
        caches: list[LayerCache],
        attend: Callable[[Tensor, _Layer, LayerCache], Tensor],
    ) -> Tensor:
        """(M, V) after the last tokens."""
        m, t, _ = h_MTK.shape
        h_RK, y_RK = h_MTK.flatten(0, 1), None
        with torch.cuda.device_of(h_RK):  # launches are on the current device
            for layer, cache in zip(self.layers, caches, strict=True):
                x_RK = _residual_norm(h_RK, y_RK, layer.attention_norm)
                y_RK = attend(x_RK, layer, cache)
                if layer is self.layers[-1] and t > 1:  # nothing reads what follows of other tokens
                    h_RK, y_RK = (x.view(m, t, -1)[:, -1].clone() for x in (h_RK, y_RK))
                x_RK = _residual_norm(h_RK, _linears(y_RK, (layer.output,)), layer.ffn_norm)
                y_RK = layer.ffn(x_RK.view(m, -1, x_RK.shape[1])).view(h_RK.shape)
            return _linears(_residual_norm(h_RK, y_RK, self._norm), (self._head,))


def _residual_norm(h_RK: Tensor, y_RK: Tensor | None, norm: _Norm) -> Tensor:
    takes = has_kernels(h_RK) and h_RK.shape[1] % 8 == 0
    compute = token_kernels.residual_norm if takes else token_math.residual_norm
    return compute(h_RK, y_RK, norm.weight_K, norm.epsilon)


def _norm_heads(x_RN: Tensor, norm: _Norm) -> Tensor:
    heads = x_RN.reshape(-1, len(norm.weight_K)).contiguous()  # one head may be part of longer rows
    return _residual_norm(heads, None, norm).view(x_RN.shape)


def _linears(x_RK: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    takes = linear_kernels.takes(x_RK, linears)
    return (linear_kernels if takes else token_math).linears(x_RK, linears)


def _products(x_RK: Tensor, linears: tuple[Linear, ...]) -> Sequence[Tensor]:
    """`_linears`, each by itself."""
    if not linear_kernels.takes(x_RK, linears):
        return token_math.products(x_RK, linears)
    sizes = [len(linear.weight_NK) for linear in linears]
    return linear_kernels.linears(x_RK, linears).split(sizes, -1)


def _attend(qkv_MN: Tensor, heads: Heads, cache: LayerCache, at: Positions) -> Tensor:
    takes = token_kernels.computes(qkv_MN, heads)
    return (token_kernels.attend if takes else token_math.attend)(qkv_MN, heads, cache, at)


def _layer_of(layer: Any) -> _Layer:
    # Read from ``_modules``: looking up an attribute takes a microsecond, of which a model has 400.
    parts, attention = layer._modules, layer.self_attn
    inside = attention._modules
    size = attention.head_dim
    qkv = tuple(_linear_of(inside[name]) for name in _PROJECTIONS[:3])
    norms = [_norm_of(inside[name]) for name in ("q_norm", "k_norm") if name in inside]
    q_norm, k_norm = norms or (None, None)
    heads = Heads(
        num=inside["q_proj"].out_features // size,
        num_keys=inside["k_proj"].out_features // size,
        size=size,
        scaling=attention.scaling,
        rotates=bool(vars(attention).get("use_rope", True)),
        window=_window_of(attention) or 0,
        q_norm_D=None if q_norm is None else q_norm.weight_K,
        k_norm_D=None if k_norm is None else k_norm.weight_K,
        epsilon=0.0 if q_norm is None else q_norm.epsilon,
    )
    return _Layer(
        attention_norm=_norm_of(parts["input_layernorm"]),
        qkv=qkv,
        heads=heads,
        output=_linear_of(inside["o_proj"]),
        ffn_norm=_norm_of(parts["post_attention_layernorm"]),
        ffn=parts["mlp"],
    )


def _window_of(attention: Any) -> int | None:
    attributes = vars(attention)
    if "sliding_window" in attributes:
        window: int | None = attributes["sliding_window"]
        return window
    # Mistral's layers read it from the configuration; Llama and Arcee have none.
    return getattr(attention.config, "sliding_window", None)


def _norm_of(norm: Any) -> _Norm:
    return _Norm(norm._parameters["weight"], norm.variance_epsilon)


def _linear_of(linear: Any) -> Linear:
    parameters = linear._parameters
    return Linear(parameters["weight"], parameters["bias"], quantised_weight(linear))


def why_no_step(model: Any) -> str | None:
    """Why a model cannot decode by `Decoder`, or None."""
    if type(model).__name__ not in _MODEL_CLASSES:
        return f"{type(model).__name__} is none of {', '.join(sorted(_MODEL_CLASSES))}"
    rope = model.model.rotary_emb.rope_type
    if "dynamic" in rope or rope == "longrope":
        return f"its RoPE ({rope}) depends on the length of the text"
    if model.training:
        return "it is in training mode"
    devices = set()
    for module, is_called in _modules(model):
        if not is_called and (reason := _why_changed(module)):
            name = next(name for name, each in model.named_modules() if each is module)
            return f"{name or type(model).__name__}: {reason}"
        devices |= {p.device for p in module._parameters.values() if p is not None}
    # In FP8 weights that are not read are on the CPU. Other models with some there have hooks.
    if len(devices - {torch.device("cpu")}) > 1:
        return "its weights are on several devices"
    return None


def _modules(model: Any) -> Iterator[tuple[nn.Module, bool]]:
    """The model's modules, and whether a step calls each, or a module that it belongs to."""
    base = model.model
    for module in (model, base, base.embed_tokens, base.norm, model.lm_head):
        yield module, False
    for layer in base.layers:
        yield layer, False
        for name, child in layer._modules.items():
            yield child, False
            for part in _descendants(child):  # not `modules`, which takes four times as long
                yield part, name == "mlp"


def _descendants(module: nn.Module) -> Iterator[nn.Module]:
    for child in module._modules.values():
        if child is not None:
            yield child
            yield from _descendants(child)


def _why_changed(module: nn.Module) -> str | None:
    """Why a module may compute something else than its class does."""
    if module._forward_pre_hooks or not all(map(is_of_order, module._forward_hooks.values())):
        return "it has hooks"
    for name, expected in _PLAIN.items():
        if name in module._modules and type(module._modules[name]) is not expected:
            return f"its {name} is {type(module._modules[name]).__name__}"
    if "forward" in vars(module) and not is_fp8(module) and not is_replaced(module):
        return "its forward was replaced"
    return None
