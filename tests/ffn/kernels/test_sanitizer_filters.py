"""What compute-sanitizer examines is every kernel that there is."""

import re

from gpu.test_sanitizer import KERNELS

from sparsellm.ffn.kernels.launch import kernels_of
from sparsellm.paths import bundled


def test_a_filter_matches_every_kernel():
    for path in sorted(bundled("cuda").glob("*/*.cu*")):
        source = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        names = list(kernels_of(source))
        assert len(names) == source.count("__global__"), f"{path} declares a kernel in another way"
        assert bool(names) == (path.suffix == ".cu"), path
        for name in names:
            assert any(part in name for part in KERNELS), f"test_sanitizer.py leaves {name} out"
