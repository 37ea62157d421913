"""The loader's worker processes: the data they send, and how they handle signals and exit.

Sequences travel through pipes in parcels: /dev/shm is not used, and the end of the pipe tells that
a worker was killed.
"""

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from sparsellm.data.lanes import Job, TrainingSequence, make
from sparsellm.data.text.token_shards import smallest_kind
from sparsellm.data.tokenizer import load_tokenizer

# To the whole process group they mean that the main process saves, for which it needs its workers.
_GROUP_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}
PARCEL_TOKENS = 32_768
MOST_SEQUENCES = 64
PARCELS_AHEAD = 6  # that a worker keeps ready beside what its pipe holds


class Worker:
    """A process that makes the sequences of a job, in order."""

    def __init__(self, job: Job, name: str, context: Any) -> None:
        self._connection, theirs = context.Pipe(duplex=False)
        self.name = name
        self._process = context.Process(target=_work, args=(job, theirs), daemon=True)
        with _main_hidden():
            self._process.start()
        theirs.close()
        self.pid: int = self._process.pid
        self._parcel: list[TrainingSequence] = []

    def next(self) -> TrainingSequence:
        """Its next sequence.

        Raises:
            ValueError, OSError: the worker's error, which names the shard.
            ChildProcessError: it was killed.
            RuntimeError: a bug in this program, with the worker's traceback.
        """
        if not self._parcel:
            self._parcel = self._receive()
            self._parcel.reverse()
        return self._parcel.pop()

    def _receive(self) -> list[TrainingSequence]:
        try:
            message = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(message, Exception):
            raise message
        return [TrainingSequence(tokens_T1, lane) for tokens_T1, lane in zip(*message, strict=True)]

    def _died(self) -> ChildProcessError:
        self._process.join(5)
        code = self._process.exitcode
        cause = f"ended with exit code {code}"
        if code is not None and code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
        advice = (
            "; the system kills processes when memory runs out: lower data.num_workers"
            if code == -signal.SIGKILL
            else ""
        )
        return ChildProcessError(
            f"{self.name} (process {self.pid}) {cause}{advice}. The same command resumes from the "
            "last checkpoint"
        )

    def close(self) -> None:
        """Ends the process."""
        # A worker ignores its first SIGTERM, and has nothing that a kill could damage.
        self._process.kill()
        self._process.join()
        self._connection.close()


def start_workers(job: Job, num_workers: int) -> list[Worker]:
    """Workers that divide the lanes of a rank's job."""
    context, lanes = worker_context(), list(job.lanes.items())
    num_workers = min(num_workers, len(lanes))
    return [
        Worker(
            job._replace(lanes=dict(lanes[index::num_workers])),
            f"data worker {index} of {num_workers}",
            context,
        )
        for index in range(num_workers)
    ]


def _work(job: Job, connection: Connection) -> None:
    begin_worker()
    parcels: queue.Queue[bytes] = queue.Queue(PARCELS_AHEAD)
    sender = threading.Thread(target=_send, args=(parcels, connection), daemon=True)
    sender.start()
    for parcel in _parcels(job):
        parcels.put(parcel)
    parcels.join()
    connection.close()


def _send(parcels: queue.Queue[bytes], connection: Connection) -> None:
    while True:
        parcel = parcels.get()
        try:
            connection.send_bytes(parcel)
        except OSError:  # the main process has ended
            os._exit(1)
        parcels.task_done()


def _parcels(job: Job) -> Iterator[bytes]:
    """Pickled lists of sequences; an error, if there is one, comes last."""
    most = min(max(PARCEL_TOKENS // job.config.context_length, 1), MOST_SEQUENCES)
    parcel: list[TrainingSequence] = []
    try:
        tokenizer = load_tokenizer(job.tokenizer)
        kind = smallest_kind(tokenizer.vocab_size)
        for sequence in make(job, tokenizer):
            parcel.append(sequence)
            if len(parcel) == most:
                yield _pickled(parcel, kind)
                parcel = []
    except (ValueError, OSError) as error:
        # As a value: the main process raises it without this one's traceback.
        failure: Exception = error
        if type(error).__module__ != "builtins":  # other classes need not survive pickling
            failure = (OSError if isinstance(error, OSError) else ValueError)(str(error))
    except Exception:
        failure = RuntimeError(f"a data worker failed:\n{traceback.format_exc()}")
    if parcel:
        yield _pickled(parcel, kind)
    yield pickle.dumps(failure)


def _pickled(parcel: list[TrainingSequence], kind: Any) -> bytes:
    tokens_ST1 = np.stack([sequence.tokens_T1 for sequence in parcel]).astype(kind)
    return pickle.dumps((tokens_ST1, [sequence.lane for sequence in parcel]), protocol=5)


def worker_context() -> Any:
    """The forkserver, which imports this module once per rank; spawning would once per worker.

    A fork of the training process would inherit the threads of CUDA, tiktoken and Arrow in an
    unknown state.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # The server inherits the mask, so that no signal ends it, and its workers with it. Signals are
    # blocked, not ignored: any thread may block them, and this process gets them afterwards.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)  # it unblocked some
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


@contextmanager
def _main_hidden() -> Iterator[None]:
    """A process that is started here does not import the main script.

    It needs nothing of it. A script that trains without a guard would train in its workers too, and
    one that Python reads from stdin could not be imported.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def begin_worker() -> None:
    """Sets up a worker's process: one thread, no death by a signal to the group."""
    pa.set_cpu_count(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The first may be the group's; a second comes from a main process that wants this one gone.
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
