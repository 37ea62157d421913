"""No kernel reads or writes out of bounds, and no two threads race in shared memory."""

import shutil
import subprocess
import sys

import pytest

from sparsellm.ffn.kernels.compiler.compile import sources

pytestmark = pytest.mark.gpu
SANITIZER = shutil.which("compute-sanitizer")
# Our kernels (tests/ffn/kernels/test_sanitizer_filters.py); PyTorch's own are not what is examined.
KERNELS = list(sources())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer_finds_nothing(tool, architecture):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    filters = [f"--kernel-name=kns={name}" for name in KERNELS]
    command = [SANITIZER, f"--tool={tool}", "--error-exitcode=9", *filters]
    result = subprocess.run(
        [*command, sys.executable, "-m", "tests.gpu.sanitized", architecture.name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "all kernels ran" in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.returncode == 0, result.stdout[-3000:]
