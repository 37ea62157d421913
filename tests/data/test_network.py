"""Faults of a network: how long they are waited for."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from sparsellm.data.text import network
from sparsellm.data.text.network import with_retries


class _BusyError(Exception):
    def __init__(self, seconds):
        super().__init__("busy")
        self.response = SimpleNamespace(status_code=503, headers={"Retry-After": str(seconds)})


def test_faults_that_last_are_named_in_time(monkeypatch):
    monkeypatch.setattr(network, "MAX_SECONDS", 1)
    monkeypatch.setattr(network, "LEAST_WAIT_SECONDS", 0.1)
    calls = []

    def fail():
        calls.append(time.monotonic())
        raise _BusyError(0)

    with pytest.raises(ConnectionError, match=r"x\.parquet: gave up after \d attempts \(busy\)"):
        with_retries(fail, "x.parquet")
    assert len(calls) >= 2
    assert calls[-1] - calls[0] < 1


def test_a_server_that_asks_to_wait_longer_is_named_at_once():
    def fail():
        raise _BusyError(300)

    began = time.monotonic()
    with pytest.raises(ConnectionError, match="gave up after 1 attempt "):
        with_retries(fail, "x.parquet")
    assert time.monotonic() - began < 5
