"""Signals: one line at once, a clean end before the first step, a second signal that quits."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from conftest import process_env

# The main thread sits in C, as in a collective: no Python handler runs there.
PROGRAM = """
import ctypes, sys, time
from sparsellm.training import signals
signals.ECHO_SECONDS = 0.3
with signals.StopRequest() as stop:
    if "began" in sys.argv:
        stop.begin()
    print("ready", flush=True)
    if "blocked" in sys.argv:
        libc = ctypes.CDLL(None)
        while True:
            libc.sleep(60)
    while stop.received is None:
        time.sleep(0.01)
    print("received", stop.received, flush=True)
    time.sleep(30)
"""


def _start(*words):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=process_env(),
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_before_the_first_step_it_ends_at_once_and_says_so(number):
    process = _start("blocked")
    process.send_signal(getattr(signal, number))
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert errors == f"{number} before the first step: ends; there is nothing to save\n"


def test_later_it_is_answered_at_once_and_a_second_one_quits():
    process = _start("began", "blocked")
    process.send_signal(signal.SIGTERM)
    first = process.stderr.readline()
    assert first == "SIGTERM: saves after this step, then ends; a second signal ends at once\n"
    process.send_signal(signal.SIGTERM)  # a launcher's echo of the same request
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT
    assert errors == "SIGINT again: ends at once, without saving\n"


def test_a_warning_is_not_the_first_of_two():
    process = _start("began")
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "received SIGUSR1\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM


def test_the_handlers_are_taken_away():
    program = """
import signal
from sparsellm.training.signals import STOP_SIGNALS, StopRequest
before = [signal.getsignal(number) for number in STOP_SIGNALS]
for _ in range(2):
    with StopRequest():
        assert signal.getsignal(signal.SIGHUP) not in before
assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
assert signal.set_wakeup_fd(-1) == -1
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=process_env(), timeout=20)
