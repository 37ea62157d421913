"""What is compiled while a run is built is all that training's kernels need."""

import threading

import pytest
import torch

from gpu.conditions import need_kernels
from sparsellm.ffn.costs import measure_training_costs
from sparsellm.ffn.dispatch import Measured
from sparsellm.ffn.kernels.compiler import compile, compile_cache, nvrtc
from sparsellm.ffn.kernels.compiler.compile_ahead import compile_ahead

pytestmark = pytest.mark.gpu
CACHES = (compile.load, compile._module, compile_cache.cache_folder, measure_training_costs)


def _forget():
    for cached in CACHES:
        cached.cache_clear()


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    need_kernels()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    _forget()
    yield
    _forget()


@pytest.mark.parametrize("format", ["union", "twell"])
@pytest.mark.usefixtures("empty_cache")
def test_nothing_is_left_to_compile(monkeypatch, format):
    fp8 = torch.cuda.get_device_capability() >= (8, 9)
    compile_ahead(format, 0, "relu", fp8=fp8)
    for thread in threading.enumerate():
        if thread.name == "compile_ahead":
            thread.join()
    assert nvrtc.installed().build  # it compiles an empty source to know

    def refuse(source, name, options):
        raise AssertionError(f"{name} had not been compiled")

    monkeypatch.setattr(nvrtc.installed(), "compile", refuse)
    call = Measured(4096, 512, 2048, True, format, 0, fp8=fp8)
    costs = measure_training_costs(call, compiled=False, ordered=True)
    assert min(costs.dense, costs.fixed) > 0
