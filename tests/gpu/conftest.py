"""Tests that ask for ``architecture`` run once per architecture's kernels that the GPU can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpu.conditions import forced, need_kernels
from sparsellm.ffn.kernels.gpu_architecture import ARCHITECTURES, GPUArchitecture


@pytest.fixture(params=ARCHITECTURES, ids=lambda architecture: architecture.name)
def architecture(request: pytest.FixtureRequest) -> Iterator[GPUArchitecture]:
    """Each in turn, in place of what the GPU would choose."""
    own: GPUArchitecture = request.param
    need_kernels()
    if not own.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"this GPU cannot run the kernels of {own.name}")
    with forced(own.name):
        yield own
