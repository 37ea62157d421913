"""Weights and optimizer state as plain tensors by name, whatever shards them, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sparsellm.runs.checkpoint import MODEL_FILE, OPTIMIZER_FILE


def gather_model(model: nn.Module) -> dict[str, Tensor]:
    """fp32 parameters by Hugging Face's names, whole and on the CPU; shared ones once.

    Every rank must call it (FSDP2 gathers each parameter in turn).
    """
    return {name: _whole(parameter) for name, parameter in model.named_parameters()}


def gather_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state as ``<entry>.<parameter>``; every rank must call it."""
    for name, parameter in model.named_parameters():
        assert optimizer.state[parameter], f"no optimizer state for {name}; step comes before save"
    return {
        f"{entry}.{name}": _whole(value)
        for name, parameter in model.named_parameters()
        for entry, value in sorted(optimizer.state[parameter].items())
    }


@torch.no_grad()
def restore_model(
    model: nn.Module,
    state: dict[str, Tensor],
    source: str = MODEL_FILE,
    remedy: str = "resume with the recipe.yaml beside it",
) -> None:
    """Copies what `gather_model` gave into a model of the same shapes.

    Raises:
        ValueError: names or shapes differ; the message has ``source`` and ``remedy``.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != state.keys():
        odd = sorted(parameters.keys() ^ state.keys())
        raise ValueError(
            f"{source} does not match the recipe's model: {len(odd)} names differ, "
            f"such as {odd[0]}; {remedy}"
        )
    for name, parameter in parameters.items():
        if parameter.shape != state[name].shape:
            raise ValueError(
                f"{source}: {name} has shape {tuple(state[name].shape)}, the recipe's model "
                f"{tuple(parameter.shape)}; {remedy}"
            )
        parameter.copy_(_like(state[name], parameter))


@torch.no_grad()
def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]
) -> None:
    """Sets the optimizer's state of every parameter to what `gather_optimizer` gave.

    Raises:
        ValueError: some parameter has no state.
    """
    names = dict(model.named_parameters())
    missing = sorted(names.keys() - {key.split(".", 1)[1] for key in state})
    if missing:
        raise ValueError(
            f"{OPTIMIZER_FILE} has no state for {len(missing)} parameters, such as {missing[0]}; "
            "resume from an older checkpoint"
        )
    for key, value in state.items():
        entry, name = key.split(".", 1)
        parameter = names[name]
        # AdamW's `step` is one number a parameter; the moments have the parameter's layout.
        restored = _like(value, parameter) if value.shape == parameter.shape else value
        optimizer.state[parameter][entry] = restored.to(parameter.device)


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """``whole`` in the layout of ``parameter``: sharded as it is under FSDP2."""
    whole = whole.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole.clone()
