"""Faults of a network: how long they are waited for."""

from functools import partial
from types import SimpleNamespace

import pytest

from sparsellm.data.text import network
from sparsellm.data.text.network import with_retries


class _BusyError(Exception):
    def __init__(self, seconds):
        super().__init__("busy")
        self.response = SimpleNamespace(status_code=503, headers={"Retry-After": str(seconds)})


@pytest.fixture
def slept(monkeypatch):
    """How long it waited each time, by a clock that nothing else moves."""
    waits = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(network, "time", clock)
    return waits


def _fail(seconds):
    raise _BusyError(seconds)


def test_faults_that_last_are_named_in_time(slept):
    with pytest.raises(ConnectionError, match=r"x\.parquet: gave up after \d+ attempts \(busy\)"):
        with_retries(partial(_fail, 0), "x.parquet")
    assert len(slept) >= 2
    assert sum(slept) < network.MAX_SECONDS


def test_a_server_that_asks_to_wait_longer_is_named_at_once(slept):
    with pytest.raises(ConnectionError, match="gave up after 1 attempt "):
        with_retries(partial(_fail, 300), "x.parquet")
    assert not slept
