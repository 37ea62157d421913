"""Which GPU runs whose kernels, without one."""

import pytest
import torch

from sparsellm.ffn.kernels.compiler import gpu_architecture
from sparsellm.ffn.kernels.compiler.gpu_architecture import (
    FORCED,
    architecture_for,
    architecture_of,
    target_of,
    unsupported,
)

BY_NVRTC_12_4 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)
BY_NVRTC_12_8 = (*BY_NVRTC_12_4, 100, 101, 120)
BY_NVRTC_13 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.mark.parametrize(
    ("capability", "name", "target"),
    [
        ((7, 5), None, "sm_75"),
        ((8, 0), "portable", "sm_80"),
        ((8, 6), "portable", "sm_86"),
        ((8, 9), "portable", "sm_89"),
        ((9, 0), "hopper", "sm_90a"),
        ((10, 0), "portable", "sm_100"),
        ((12, 0), "portable", "sm_120"),
    ],
)
def test_a_gpu_runs_the_best_kernels_that_it_can(capability, name, target):
    architecture = architecture_for(capability)
    assert (architecture and architecture.name) == name
    assert target_of(capability, BY_NVRTC_13) == target


def test_an_older_nvrtc_compiles_for_the_generation_or_says_that_it_is_too_old():
    assert target_of((10, 3), BY_NVRTC_12_8) == "sm_100"
    assert target_of((12, 1), BY_NVRTC_12_8) == "sm_120"
    assert target_of((12, 1), BY_NVRTC_13) == "sm_121"
    with pytest.raises(ValueError, match=r"compute capability 10\.0 \(only up to 9\.0\)"):
        target_of((10, 0), BY_NVRTC_12_4)


@pytest.fixture
def gpu(monkeypatch):
    def use(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
        architecture_of.cache_clear()

    yield use
    architecture_of.cache_clear()


def test_a_gpu_that_is_too_old_is_named(gpu):
    gpu(7, 5)
    reason = "Some GPU (compute capability 7.5) is older than Ampere (8.0)"
    assert unsupported(0) == reason
    with pytest.raises(ValueError, match=r"older than Ampere \(8\.0\); use the dense FFN"):
        architecture_of(0)


def test_the_environment_names_another_architecture(gpu, monkeypatch):
    gpu(9, 0)
    assert architecture_of(0) is gpu_architecture.HOPPER
    monkeypatch.setenv(FORCED, "portable")
    architecture_of.cache_clear()
    assert architecture_of(0) is gpu_architecture.PORTABLE
    gpu(8, 0)
    monkeypatch.setenv(FORCED, "hopper")
    with pytest.raises(ValueError, match=r"=hopper: a GPU of .* 8\.0 runs portable"):
        architecture_of(0)
