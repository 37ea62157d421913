"""What compute-sanitizer examines is every kernel that there is."""

from __future__ import annotations

import re

from gpu.test_sanitizer import KERNELS

from sparsellm.paths import bundled

DECLARED = re.compile(r"__global__ void(?:\s+__\w+__\([^()]*\))*\s+(\w+)\(")


def test_a_filter_matches_every_kernel():
    for path in sorted(bundled("cuda").glob("*/*.cu*")):
        source = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        names = DECLARED.findall(source)
        assert len(names) == source.count("__global__"), f"{path.name} declares a kernel otherwise"
        assert names == ([path.stem] if path.suffix == ".cu" else [])
        for name in names:
            assert any(part in name for part in KERNELS), f"test_sanitizer.py leaves {name} out"
