"""The kernels of training are compiled while a run is built, each once on a node."""

import re
import threading
from pathlib import Path

import pytest

from sparsellm.ffn.kernels import union_training
from sparsellm.ffn.kernels.compiler import compile_ahead as module
from sparsellm.ffn.kernels.compiler.compile import sources
from sparsellm.ffn.kernels.compiler.compile_ahead import compile_ahead, training_sources
from sparsellm.ffn.kernels.compiler.compile_cache import cache_folder
from sparsellm.ffn.kernels.compiler.gpu_architecture import ARCHITECTURES, HOPPER
from sparsellm.training.optimization import muon_passes

MUON = Path(muon_passes.__file__)
KERNELS = Path(union_training.__file__).parent
MODULES = {"union": ["union_training", "union", "weight_grad"], "twell": ["hybrid", "twell"]}
OF_BOTH = ["gate", "transpose", "quantise", "sort_tokens"]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.parametrize("format", MODULES)
def test_they_are_all_that_the_modules_call(format, architecture):
    named = set()
    for name in (*MODULES[format], *OF_BOTH):
        text = (KERNELS / f"{name}.py").read_text()
        named |= {kernel for kernel in sources() if f'"{kernel}"' in text}
        if name == "gate":
            kinds = re.findall(r'kernel_for\(f"(\w+)_', text)
            assert kinds == ["gate", "pack"]
            named.add(f"{kinds[not architecture.makes_gate]}_{format}")
    expected = {sources()[kernel] for kernel in named}
    assert set(training_sources(format, architecture.folder)) == expected
    of_muon = {path for kernel, path in sources().items() if f'"{kernel}"' in MUON.read_text()}
    assert len(of_muon) == 1
    assert set(training_sources(format, architecture.folder, ["muon"])) == expected | of_muon
    assert set(training_sources(None, architecture.folder, ["muon"])) == of_muon


def test_ranks_compile_each_source_once(monkeypatch, tmp_path):
    compiled = []

    def device_code(path, *_, activation, fp8):
        compiled.append((path.stem, activation, fp8))
        raise RuntimeError("it does not compile")  # which the kernel's first call reports

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "device_code", device_code)
    monkeypatch.setattr(module, "architecture_of", lambda index: HOPPER)
    cache_folder.cache_clear()
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        compile_ahead("union", 0, "relu2", fp8=True)
        for thread in threading.enumerate():
            if thread.name == "compile_ahead":
                thread.join()
    cache_folder.cache_clear()
    stems = sorted(path.stem for path in training_sources("union", "sm90"))
    assert sorted(stem for stem, *_ in compiled) == stems
    assert ("gate_union", "relu2", True) in compiled
    assert ("columns_grad", "relu2", False) in compiled
    assert ("weight_grad", "relu", False) in compiled
