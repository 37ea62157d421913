"""Signals: one line at once, a clean end before the first step, and which of several quit."""

import signal
import subprocess
import sys
import time

import pytest
from conftest import process_env, python

from sparsellm.processes.signals import QUITS_AFTER

# The main thread sits in C, as in a collective: no Python handler runs there.
PROGRAM = """
import ctypes, signal, sys, time
from sparsellm.processes import signals
signals.QUITS_AFTER = {signal.SIGINT: 1.0, signal.SIGTERM: 1.5}
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


def test_a_save_of_a_minute_outlives_sigterm_again():
    """The others set the times short."""
    assert QUITS_AFTER[signal.SIGINT] < 60 < QUITS_AFTER[signal.SIGTERM]


def test_later_it_is_answered_at_once_and_ctrl_c_again_quits():
    process = _start("began", "blocked")
    process.send_signal(signal.SIGINT)
    first = process.stderr.readline()
    assert first == "SIGINT: saves after this step, then ends; Ctrl-C again ends at once\n"
    process.send_signal(signal.SIGINT)  # a launcher's echo of the same request
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT
    assert errors == "SIGINT again: ends at once, without saving\n"


def test_signals_that_belong_to_one_stop_do_not_end_its_save():
    """Slurm and systemd send several, and a launcher passes its own on."""
    process = _start("began")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "received SIGTERM\n"
    for number in ("SIGUSR1", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"):
        time.sleep(0.1)
        process.send_signal(getattr(signal, number))
    time.sleep(1)
    process.send_signal(signal.SIGUSR1)  # however much later
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # later than any save takes
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == (
        "SIGTERM: saves after this step, then ends; Ctrl-C twice ends at once\n"
        "SIGTERM again: ends at once, without saving\n"
    )


def test_the_handlers_are_taken_away():
    program = """
import signal
from sparsellm.processes.signals import STOP_SIGNALS, StopRequest
before = [signal.getsignal(number) for number in STOP_SIGNALS]
for _ in range(2):
    with StopRequest():
        assert signal.getsignal(signal.SIGHUP) not in before
assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
assert signal.set_wakeup_fd(-1) == -1
"""
    python("-c", program)
