"""Weights and optimizer state as tensors by name and back, sharded or not."""

from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sparsellm.runs.checkpoint import MODEL, MODEL_FILE, OPTIMIZER, OPTIMIZER_FILE
from sparsellm.runs.tensor_files import StoredTensors
from sparsellm.words import listed

_REMEDY = "resume with the recipe.yaml beside it"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def gather_model(model: nn.Module) -> dict[str, Tensor]:
    """fp32 parameters by Hugging Face's names, whole and on the CPU; shared ones once.

    Every rank must call it (FSDP2 gathers each parameter in turn).
    """
    gathered = {}
    for name, tensor in model_tensors(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        gathered[name] = whole.to("cpu", copy=True).contiguous()
    return gathered


def first_nonfinite(tensors: dict[str, Tensor]) -> str | None:
    """The name of the first tensor that is not finite, or None."""
    # All are queued before the first is waited for.
    finite = {name: tensor.isfinite().all() for name, tensor in tensors.items()}
    return next((name for name, is_finite in finite.items() if not is_finite), None)


def tensors_digest(tensors: dict[str, Tensor]) -> str:
    """A hash (XXH3, 128 bits, hexadecimal) of tensors on the CPU: names, types, shapes and bytes.

    The order of the names does not matter, nor how the tensors lie in files or in memory.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
    model: nn.Module, state: dict[str, Tensor], source: str = MODEL_FILE, remedy: str = _REMEDY
) -> None:
    """Copies what `gather_model` gave into a model of the same shapes.

    Raises:
        ValueError: names or shapes differ; the message has ``source`` and ``remedy``. Or a tensor
            is not of finite floating-point numbers.
    """
    _check_shapes(model, state, source, remedy)
    for name, tensor in state.items():
        if tensor.dtype not in _FLOATS:
            raise ValueError(
                f"{source}: {name} is of type {str(tensor.dtype).removeprefix('torch.')}; weights "
                f"must be of {', '.join(str(t).removeprefix('torch.') for t in _FLOATS)}"
            )
    if odd := first_nonfinite(state):
        raise ValueError(f"{source}: {odd} has NaN or infinite values; use older weights")
    for name, parameter in model.named_parameters():
        whole = state[name].to(device=parameter.device, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.copy_(whole)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Reads weights and optimizer state of a checkpoint to where they belong, sharded or not.

    Each rank reads what it holds. The checkpoint is one that `checkpoint.load` has verified.

    Raises:
        ValueError: names or shapes differ, or some parameter has no state.
    """
    weights, moments = (StoredTensors(path, kind) for kind in (MODEL, OPTIMIZER))
    _check_shapes(model, weights.empty(), MODEL_FILE, _REMEDY)
    parameters, states, stored = dict(model.named_parameters()), {}, moments.empty()
    if not stored:
        raise ValueError(
            f"{path} has weights and no optimizer state (it was imported) and cannot be resumed; "
            f"start a new run from it: --set name=NEW --init-from {path}"
        )
    if missing := sorted(parameters.keys() - {key.split(".", 1)[1] for key in stored}):
        raise ValueError(
            f"{OPTIMIZER_FILE} has no state for {len(missing)} parameters, such as {missing[0]}; "
            "resume from an older checkpoint"
        )
    for key, empty in stored.items():
        entry, name = key.split(".", 1)
        parameter = parameters[name]
        # AdamW's `step` is one number per parameter; the moments have the parameter's layout.
        like = parameter if empty.shape == parameter.shape else empty
        states[key] = torch.empty_like(
            like, dtype=empty.dtype, device=parameter.device, requires_grad=False
        )
        optimizer.state[parameter][entry] = states[key]
    weights.read(model_tensors(model))
    moments.read(states)


def _check_shapes(model: nn.Module, tensors: dict[str, Tensor], source: str, remedy: str) -> None:
    parameters = dict(model.named_parameters())
    missing, surplus = parameters.keys() - tensors.keys(), tensors.keys() - parameters.keys()
    if missing or surplus:
        name = listed(sorted(missing or surplus))
        difference = f"lacks {name} of" if missing else f"has {name}, unlike"
        raise ValueError(f"{source} {difference} the recipe's model; {remedy}")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise ValueError(
                f"{source}: {name} has shape {tuple(tensors[name].shape)}, the recipe's model "
                f"{tuple(parameter.shape)}; {remedy}"
            )
