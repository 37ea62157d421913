"""The loader's worker processes: how they start, which signals they outlive, when they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch

# To the whole process group they ask the main process to save; what serves it must live on.
_GROUP_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}


def worker_context() -> Any:
    """The forkserver: a fork of a training process would inherit CUDA's, tiktoken's and Arrow's
    threads in an unknown state, and spawning imports torch once a worker; the server imports it
    once a rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # The server inherits the mask: without it workers leave, since it is their parent. Not ignored
    # but blocked: any thread may do that, and what comes meanwhile still reaches this process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)  # that unblocked some
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def begin_worker(worker: int) -> None:
    """DataLoader's ``worker_init_fn``."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _ignore_first_sigterm()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _ignore_first_sigterm() -> None:
    # The first may be the group's; a second comes from a main process that wants this one gone.
    def second(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, second)


def _die_with_parent() -> None:
    # DataLoader's own watchdog looks at the parent's process number, which is the forkserver's.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
