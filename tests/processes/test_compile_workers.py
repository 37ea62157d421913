"""How many processes compile for a rank, and that they are started before they are needed."""

import pytest
import torch
import torch._inductor.config as inductor
from torch._inductor import async_compile

from sparsellm.processes import compile_workers


@pytest.fixture
def start(monkeypatch):
    """The size of the pool that is started on a machine with a GPU; None if none is."""

    def start(cores, ranks, chosen=None, gpu=True):
        sizes = []
        for name, value in (
            ("LOCAL_WORLD_SIZE", str(ranks)),
            ("TORCHINDUCTOR_COMPILE_THREADS", chosen),
        ):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(compile_workers, "usable_cores", lambda: cores)
        monkeypatch.setattr(async_compile, "has_triton_package", lambda: True)
        warm = staticmethod(lambda: sizes.append(async_compile.get_compile_threads()))
        monkeypatch.setattr(async_compile.AsyncCompile, "warm_pool", warm)
        monkeypatch.setattr(async_compile.AsyncCompile, "wakeup", staticmethod(lambda: None))
        with inductor.patch(compile_threads=int(chosen or 32)):
            compile_workers.start_compile_workers()
        return sizes[0] if sizes else None

    return start


def test_ranks_divide_the_cores_of_a_node(start):
    assert start(cores=64, ranks=4) == 16
    assert start(cores=16, ranks=1) == 16
    assert start(cores=128, ranks=1) == 32
    assert start(cores=4, ranks=8) == 1


def test_the_users_number_holds(start):
    assert start(cores=64, ranks=4, chosen="7") == 7


def test_without_a_gpu_none_is_started(start):
    assert start(cores=64, ranks=4, gpu=False) is None
