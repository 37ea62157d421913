"""How backward learns how many columns forward counted, without a GPU."""

import threading
import time

import pytest
import torch

from sparsellm.ffn.kernels import union_training
from sparsellm.ffn.types import Columns

WORST = 1000


class Stream:
    """Of a GPU that is done with all it was given, or not, or has failed."""

    def __init__(self, idle=False, error=None):
        self.idle, self.error = idle, error

    def query(self):
        if self.error:
            raise self.error
        return self.idle


def columns(*needed):
    none = torch.empty(0)
    offset = torch.tensor([0, 3, 7], dtype=torch.int32)
    return Columns(offset, none, none, none, none, torch.tensor(needed))


@pytest.fixture
def gpu(monkeypatch):
    def use(stream):
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
        monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)

    return use


def test_what_has_arrived_is_taken(gpu):
    gpu(Stream(error=AssertionError("nothing to wait for")))
    assert union_training._needed(columns(7, 20), WORST) == (7, 20)


def test_what_is_under_way_is_waited_for(gpu):
    gpu(Stream())
    saved = columns(-1, -1)

    def arrive():
        time.sleep(0.05)
        saved.needed[0] = 7
        time.sleep(0.01)
        saved.needed[1] = 20

    sender = threading.Thread(target=arrive)
    sender.start()
    assert union_training._needed(saved, WORST) == (7, 20)
    sender.join()


def test_what_never_will_come_is_read_from_the_gpu(gpu):
    gpu(Stream(idle=True))
    assert union_training._needed(columns(-1, -1), WORST) == (7, None)


def test_what_a_kernel_died_of_is_raised(gpu):
    gpu(Stream(error=RuntimeError("an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        union_training._needed(columns(-1, -1), WORST)
