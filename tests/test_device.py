"""Whether kernels can run on a device, and what is said where they cannot."""

from __future__ import annotations

import sys

import pytest
import torch

from sparsellm.device import check_liger


def test_liger_without_a_gpu_says_what_to_do():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    message = r"runtime.loss: liger needs a CUDA device; set runtime.loss=torch"
    with pytest.raises(ValueError, match=message):
        check_liger("runtime.loss")


def test_liger_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ValueError, match=r"runtime.loss: liger needs `pip install .*liger"):
        check_liger("runtime.loss")
