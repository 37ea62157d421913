"""Which kernels each generation of GPUs runs.

A generation with its own kernels is a folder under ``cuda/`` and a `GPUArchitecture` here.
"""

import functools
import os
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsellm.ffn.types import ELEMENTS
from sparsellm.paths import has_cupy, how_to_install_cuda

Capability = tuple[int, int]

# wgmma, TMA multicast and setmaxnreg exist only in the "a" (architecture-specific) target.
_SPECIFIC_TARGETS = {(9, 0): "sm_90a"}
# The environment variable that selects the kernels, where a GPU can run several.
FORCED = "SPARSELLM_GPU_ARCHITECTURE"


@dataclass(frozen=True)
class GPUArchitecture:
    """What differs between generations of GPUs in the kernels of an FFN."""

    name: str
    folder: str  # of cuda/: kernels of its own, and headers of those that it shares
    oldest: Capability
    newest: Capability | None
    makes_gate: bool  # its ``gate_…`` compute the gate; else ``pack_…`` packs a dense GEMM's
    tensor_maps: bool  # x and dy are read through the bulk copy engine

    def runs_on(self, capability: Capability) -> bool:
        """Whether a GPU of this compute capability can run the kernels."""
        return self.oldest <= capability and (self.newest is None or capability <= self.newest)


HOPPER = GPUArchitecture(
    name="hopper",
    folder="sm90",
    oldest=(9, 0),
    newest=(9, 0),  # wgmma is gone from Blackwell on
    makes_gate=True,
    tensor_maps=True,
)
PORTABLE = GPUArchitecture(
    name="portable",
    folder="sm80",
    oldest=(8, 0),  # bf16 in tensor cores, cp.async
    newest=None,
    makes_gate=False,
    tensor_maps=False,
)
ARCHITECTURES = (HOPPER, PORTABLE)  # a GPU uses the first one that it can run


def target_of(capability: Capability, supported: Collection[int]) -> str:
    """The target that NVRTC compiles for, such as ``sm_90a``.

    It is the GPU's own; for a version of NVRTC that does not know it, the first one of its
    generation, whose machine code all of them run.

    Args:
        capability: the GPU's compute capability.
        supported: those that NVRTC knows, such as 90 for (9, 0).

    Raises:
        ValueError: NVRTC knows none that the GPU runs.
    """
    generation, _ = capability
    for target in (capability, (generation, 0)):
        major, minor = target
        if 10 * major + minor in supported:
            return _SPECIFIC_TARGETS.get(target, f"sm_{major}{minor}")
    raise ValueError(
        f"NVRTC knows no GPU of compute capability {_dotted(capability)} (only "
        f"up to {_dotted(divmod(max(supported), 10))}); install a newer CUDA build of torch, or a "
        "newer NVRTC"
    )


def architecture_for(capability: Capability, forced: str = "") -> GPUArchitecture | None:
    """The architecture whose kernels a GPU of this compute capability runs, or None.

    Args:
        capability: such as (8, 0).
        forced: name of one of the architectures that the GPU can run; "" chooses the best.

    Raises:
        ValueError: there is no such architecture, or the GPU cannot run it.
    """
    able = [a for a in ARCHITECTURES if a.runs_on(capability) and forced in {"", a.name}]
    if forced and not able:
        names = ", ".join(a.name for a in ARCHITECTURES if a.runs_on(capability))
        raise ValueError(
            f"{FORCED}={forced}: a GPU of compute capability {_dotted(capability)} runs "
            f"{names or 'none of the kernels'}"
        )
    return able[0] if able else None


def device_name(device: torch.device) -> str:
    """Such as "NVIDIA H200" or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def described(device: torch.device | int) -> str:
    """Such as "NVIDIA H200 (compute capability 9.0)"."""
    capability = _dotted(torch.cuda.get_device_capability(device))
    return f"{torch.cuda.get_device_name(device)} (compute capability {capability})"


def unsupported(device: torch.device | int) -> str | None:
    """Why a GPU runs none of the kernels, or None."""
    if architecture_for(torch.cuda.get_device_capability(device)) is not None:
        return None
    return f"{described(device)} is older than Ampere ({_dotted(PORTABLE.oldest)})"


@functools.cache
def why_no_kernels(device: torch.device) -> str | None:
    """Why the sparse kernels cannot run on a GPU here, or None."""
    if has_cupy():
        return unsupported(device)
    return f"the sparse kernels need CuPy: {how_to_install_cuda(torch.version.cuda)}"


def gpu_runs_kernels(x: Tensor) -> bool:
    """Whether a tensor is on a GPU that runs the kernels."""
    return x.is_cuda and why_no_kernels(x.device) is None


def has_kernels(x: Tensor) -> bool:
    """Whether a tensor is on a GPU that runs the kernels, in a type that most of them take."""
    return x.dtype in ELEMENTS and gpu_runs_kernels(x)


@functools.cache
def architecture_of(device_index: int) -> GPUArchitecture:
    """The architecture whose kernels a GPU runs; the environment variable `FORCED` may override it.

    Raises:
        ValueError: there is none; see `architecture_for`.
    """
    capability = torch.cuda.get_device_capability(device_index)
    architecture = architecture_for(capability, os.environ.get(FORCED, ""))
    if architecture is None:
        raise ValueError(f"{unsupported(device_index)}; use the dense FFN")
    return architecture


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
