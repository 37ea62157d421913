"""What compute-sanitizer examines is every kernel that there is."""

from __future__ import annotations

import re

import pytest
from gpu.test_sanitizer import KERNELS

from sparsellm.ffn.kernels.signature import kernels_of
from sparsellm.paths import bundled

SOURCES = sorted(bundled("cuda").glob("*/*.cu*"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_filter_matches_every_kernel(path):
    source = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    names = list(kernels_of(source))
    assert len(names) == source.count("__global__"), "a kernel is declared in a way unknown here"
    assert bool(names) == (path.suffix == ".cu")
    for name in names:
        assert any(part in name for part in KERNELS), f"test_sanitizer.py leaves {name} out"
