import pytest

from ffn.kernels import nvrtc


@pytest.fixture
def cubins():
    """The folder of what was compiled before, beside the compilers."""
    folder = nvrtc.FOLDER / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
