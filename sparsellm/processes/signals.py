"""Stopping by signal: the first SIGTERM, SIGINT, SIGHUP or SIGUSR1 saves the run and ends it.

So does an output that nobody reads any more: Ctrl-C also ends the `tee` that shows and keeps it.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Self

from sparsellm.processes import ranks
from sparsellm.processes.outputs import lasting_outputs

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

# What quits without saving: the same signal again, so many seconds after it first came, or later.
# A terminal and a launcher may both deliver one Ctrl-C; a scheduler may send SIGTERM repeatedly.
QUITS_AFTER = {signal.SIGINT: 2.0, signal.SIGTERM: 120.0}


class StopRequest:
    """Installs the handlers while it is entered; `received` names the signal, or is None.

    A thread reads the signals as they arrive, so that an answer does not wait for the main thread,
    which may be compiling or inside a collective:

    - the first one prints one line; before the first step, where there is nothing to save, it ends
      the process with status 0;
    - Ctrl-C again, or SIGTERM after two minutes, quits at once with status 128 + its number. Any
      other later signal belongs to the same request: Slurm and systemd send several for one stop.

    From the first step on, a `print` that nobody reads asks for a stop, too, and does not fail.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._began = False  # a step has been taken: there is something to save
        self._first: dict[signal.Signals, float] = {}  # when each signal came first
        self._previous: dict[int, object] = {}
        self._previous_fd = -1
        self._lock = threading.Lock()
        self._outputs = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._read_signals, daemon=True)
        self._thread.start()
        self._outputs.enter_context(lasting_outputs(self._lose_reader))
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_fd)
        self._theirs.close()
        self._thread.join()
        self._ours.close()
        self._outputs.close()

    def begin(self) -> None:
        """From now on a signal waits for the loop, which saves."""
        with self._lock:
            self._began = True

    def ask(self, reason: str) -> None:
        """Asks for a stop for another reason than a signal to this rank."""
        with self._lock:
            if self.received is not None:
                return
            self.received = reason
            began = self._began
        self._answer_first(reason, began)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # In the main thread, between two bytecodes. The lines and exits are the thread's.
        self.received = self.received or signal.Signals(number).name

    def _lose_reader(self) -> bool:
        """Whether the run goes on without a reader, until it is saved."""
        if self._began:
            self.ask("nobody reads its output")
        return self._began

    def _read_signals(self) -> None:
        while numbers := self._ours.recv(16):
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._answer(signal.Signals(number))

    def _answer(self, sent: signal.Signals) -> None:
        now = time.monotonic()
        with self._lock:
            is_first = not self._first
            waited = now - self._first.setdefault(sent, now)
            self.received = self.received or sent.name
            began = self._began
        if is_first:
            self._answer_first(sent.name, began)
        elif waited >= QUITS_AFTER.get(sent, math.inf):
            _say(f"{sent.name} again: ends at once, without saving")
            ranks.leave(128 + sent)

    def _answer_first(self, reason: str, began: bool) -> None:
        if not began:
            _say(f"{reason} before the first step: ends; there is nothing to save")
            ranks.leave(0)
        again = "again" if reason == signal.SIGINT.name else "twice"
        _say(f"{reason}: saves after this step, then ends; Ctrl-C {again} ends at once")


def _say(line: str) -> None:
    if ranks.is_main():
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"{line}\n".encode())
