"""The activation of replaced FFNs in a model's configurations, for whoever loads it later."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn

from sparsellm.ffn.inference_path.discover import ACTIVATION_ATTRIBUTES, find_ffns
from sparsellm.ffn.training_path.module import SparseFFN

# What configurations of transformers call the activation of FFNs.
_ACTIVATION_KEYS = (
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "dense_act_fn",  # T5, which saves it and reads the next
    "feed_forward_proj",
)
_GATED = "gated-"  # before the activation in T5's key


def set_in_configs(
    model: nn.Module,
    activation: str,
    replaced: dict[str, Callable[[Tensor], Any] | None],
    left_alone: Iterable[str],
) -> set[str]:
    """Writes the activation into the model's configurations; returns the FFNs that they cover.

    A configuration has one activation for all FFNs of its module, and for whatever else uses it,
    such as a convolution: where something else has the activation that was replaced, the
    configuration stays. A model of several parts, such as one of images and text, has several.

    Args:
        model: after the FFNs have been replaced.
        activation: the new one.
        replaced: the activation that each FFN had, if it named one, by the names of the FFNs.
        left_alone: names of FFNs that were not replaced.
    """
    ffns = {n: module for n, module in model.named_modules() if isinstance(module, SparseFFN)}
    unchanged = {*dict(find_ffns(model)), *left_alone, *ffns}
    unchanged -= {name for name, ffn in ffns.items() if ffn.activation == activation}
    activations = [each for each in replaced.values() if each is not None]
    covered: set[str] = set()
    config_ids: set[int] = set()  # a configuration is that of the outermost module that has it
    for prefix, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        keys = [key for key in _ACTIVATION_KEYS if isinstance(getattr(config, key, None), str)]
        if not keys or id(config) in config_ids:
            continue
        config_ids.add(id(config))
        inside = {name for name in replaced if _is_inside(name, prefix)}
        if not inside or any(_is_inside(name, prefix) for name in unchanged):
            continue
        values = {key: getattr(config, key) for key in keys}
        new = {k: (_GATED if v.startswith(_GATED) else "") + activation for k, v in values.items()}
        if values != new:
            parts = module.modules()
            if any(_has_activation(part, activations, values.values()) for part in parts):
                continue
            for key, value in new.items():
                setattr(config, key, value)
        covered |= inside
    return covered


def _has_activation(
    module: nn.Module, activations: list[Callable[[Tensor], Any]], names: Collection[str]
) -> bool:
    """Whether a module has one of the activations: its class, the same function or its name."""
    kinds = {type(each) for each in activations if isinstance(each, nn.Module)}
    for attribute, value in (vars(module) | module._modules).items():
        if type(value) in kinds or any(value is each for each in activations):
            return True
        if attribute in ACTIVATION_ATTRIBUTES and isinstance(value, str) and value in names:
            return True
    return False


def _is_inside(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(prefix + ".")
