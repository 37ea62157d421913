"""Tests that ask for ``architecture`` run once per architecture's kernels that the GPU can run."""

import os
from collections.abc import Iterator

import pytest
import torch

from gpu.conditions import forced, need_kernels, why_no_kernels
from sparsellm.ffn.kernels.compiler import compile
from sparsellm.ffn.kernels.compiler.gpu_architecture import ARCHITECTURES, GPUArchitecture


@pytest.fixture(params=ARCHITECTURES, ids=lambda architecture: architecture.name)
def architecture(request: pytest.FixtureRequest) -> Iterator[GPUArchitecture]:
    """Each in turn, in place of what the GPU would choose."""
    param: GPUArchitecture = request.param
    need_kernels()
    if not param.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"this GPU cannot run the kernels of {param.name}")
    with forced(param.name):
        yield param


@pytest.fixture
def sparse_kernels() -> None:
    """They run here, or the test is skipped by the reason why not."""
    need_kernels()


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Each process of ``pytest -n`` compiles its share of the kernels before it runs tests.

    Otherwise all of them wait for one kernel after another, which the same tests come to first.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1 or not torch.cuda.is_available() or why_no_kernels():
        return
    capability = torch.cuda.get_device_capability()
    folders = {"common", *(a.folder for a in ARCHITECTURES if a.runs_on(capability))}
    by_file = {path: kernel for kernel, path in compile.sources().items()}
    kernels = [kernel for path, kernel in by_file.items() if path.parent.name in folders]
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    for kernel in kernels[worker::processes]:
        compile.kernel_for(kernel, torch.empty(0, device="cuda"))
