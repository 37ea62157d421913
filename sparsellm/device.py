"""The device and the number type of a trained model, and whether kernels can run there."""

import torch
from transformers import PreTrainedModel as HFModel

from sparsellm.arguments import sparse_needs_gpu
from sparsellm.ffn import fp8
from sparsellm.ffn.kernels.compiler.gpu_architecture import why_no_kernels
from sparsellm.ffn.reference import stands_in

# By the names of this package, of torch and of configurations.
_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def pick_device(name: str | None) -> torch.device:
    """A device by name; by default a GPU if there is one.

    Raises:
        ValueError: there is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        if name.partition(":")[0] == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device {name}: PyTorch {torch.__version__} finds no CUDA device (nvidia-smi "
                "lists those of the driver); to use the CPU give no device, or cpu"
            ) from error
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name}: {reason}; give cpu, cuda or cuda:N") from error
    return device


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU, as in training; fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def pick_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """A type of weights, given as torch's or by name; by default `default_dtype`.

    Raises:
        ValueError: it is another type, or the name of none.
    """
    if dtype is None:
        return default_dtype(device)
    named = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if named not in _DTYPES.values():
        raise ValueError(f"dtype {dtype!r}: give one of {', '.join(_DTYPES)}, or torch's own")
    assert isinstance(named, torch.dtype)
    return named


def place(model: HFModel, device: torch.device | str, dtype: torch.dtype) -> HFModel:
    """Moves a model, its parameters in ``dtype``, and puts it into evaluation mode."""
    # Not `model.to(dtype)`: it would round RoPE's frequencies, which are a buffer, and so change
    # the angle of a distant position by whole turns. Training and stock loading keep them in fp32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(device).eval()


def refuse_sparse_without_gpu(option: str, device: torch.device, remedy: str) -> None:
    """Raises ValueError if sparse kernels were asked for and there is only a CPU."""
    if device.type == "cpu" and not stands_in(device):
        raise sparse_needs_gpu(option, remedy)


def check_fp8(key: str, device: torch.device) -> None:
    """Checks that a device can compute in FP8, for a recipe key; a CPU emulates it.

    Raises:
        ValueError: the GPU is too old, or CuPy is not installed.
    """
    if device.type != "cuda":
        return
    reason = fp8.unsupported(device) or why_no_kernels(device)
    if reason is not None:
        raise ValueError(f"{key}: fp8: {reason}; or set {key}=bf16")
