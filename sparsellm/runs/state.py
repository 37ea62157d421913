"""Weights and optimizer state as tensors by name and back, sharded or not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from sparsellm.runs.checkpoint import MODEL, MODEL_FILE, OPTIMIZER, OPTIMIZER_FILE
from sparsellm.runs.storage import CheckpointReader, load_tensors

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def gather_model(model: nn.Module) -> dict[str, Tensor]:
    """fp32 parameters by Hugging Face's names, whole and on the CPU; shared ones once.

    Every rank must call it (FSDP2 gathers each parameter in turn).
    """
    return {name: _whole(parameter) for name, parameter in model.named_parameters()}


def first_nonfinite(tensors: dict[str, Tensor]) -> str | None:
    """The name of the first tensor that is not finite, or None."""
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    for names in by_device.values():  # one synchronisation for each
        finite = torch.stack([tensors[name].isfinite().all() for name in names]).tolist()
        if not all(finite):
            return names[finite.index(False)]
    return None


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters themselves by Hugging Face's names, sharded as they are; shared ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's own tensors as ``<entry>.<parameter>``, sharded as they are."""
    for name, parameter in model.named_parameters():
        assert optimizer.state[parameter], f"no optimizer state for {name}; step comes before save"
    return {
        f"{entry}.{name}": value.detach()
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
        ValueError: names or shapes differ; the message has ``source`` and ``remedy``. Or a tensor
            is not of finite floating-point numbers.
    """
    _check_shapes(model, {name: tensor.shape for name, tensor in state.items()}, source, remedy)
    for name, tensor in state.items():
        if tensor.dtype not in _FLOATS:
            raise ValueError(
                f"{source}: {name} is of type {str(tensor.dtype).removeprefix('torch.')}; weights "
                f"must be of {', '.join(str(t).removeprefix('torch.') for t in _FLOATS)}"
            )
    if odd := first_nonfinite(state):
        raise ValueError(f"{source}: {odd} has NaN or infinite values; take older weights")
    for name, parameter in model.named_parameters():
        parameter.copy_(_like(state[name], parameter))


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: Path,
    group: ProcessGroup | None = None,
) -> None:
    """Reads weights and optimizer state of a checkpoint to where they belong, sharded or not.

    All ranks of a group call it, and each reads what it holds. The checkpoint is one that
    `checkpoint.load` has verified.

    Raises:
        ValueError: names or shapes differ, or some parameter has no state.
    """
    remedy = "resume with the recipe.yaml beside it"
    reader = CheckpointReader(path, [MODEL, OPTIMIZER], remedy)
    stored: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {MODEL: {}, OPTIMIZER: {}}
    for key, shape in reader.shapes().items():
        kind, _, name = key.partition("/")
        stored[kind][name] = shape
    _check_shapes(
        model, {name: shape for name, (shape, _) in stored[MODEL].items()}, MODEL_FILE, remedy
    )
    parameters = dict(model.named_parameters())
    _check_optimizer(parameters.keys(), stored[OPTIMIZER].keys())
    states = {
        key: _new_state(parameters[key.split(".", 1)[1]], shape, dtype)
        for key, (shape, dtype) in stored[OPTIMIZER].items()
    }
    tensors = {f"{MODEL}/{name}": tensor for name, tensor in model_tensors(model).items()}
    load_tensors(tensors | {f"{OPTIMIZER}/{key}": t for key, t in states.items()}, reader, group)
    for key, value in states.items():
        entry, name = key.split(".", 1)
        optimizer.state[parameters[name]][entry] = value


def _check_optimizer(parameters: Iterable[str], keys: Iterable[str]) -> None:
    missing = sorted(set(parameters) - {key.split(".", 1)[1] for key in keys})
    if missing:
        raise ValueError(
            f"{OPTIMIZER_FILE} has no state for {len(missing)} parameters, such as {missing[0]}; "
            "resume from an older checkpoint"
        )


def _new_state(parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    # AdamW's `step` is one number a parameter; the moments have the parameter's layout.
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _check_shapes(
    model: nn.Module, shapes: dict[str, torch.Size], source: str, remedy: str
) -> None:
    parameters = dict(model.named_parameters())
    if parameters.keys() != shapes.keys():
        odd = sorted(parameters.keys() ^ shapes.keys())
        raise ValueError(
            f"{source} does not match the recipe's model: {len(odd)} names differ, "
            f"such as {odd[0]}; {remedy}"
        )
    for name, parameter in parameters.items():
        if parameter.shape != shapes[name]:
            raise ValueError(
                f"{source}: {name} has shape {tuple(shapes[name])}, the recipe's model "
                f"{tuple(parameter.shape)}; {remedy}"
            )


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """``whole`` in the layout of ``parameter``: sharded as it is under FSDP2."""
    whole = whole.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole.clone()
