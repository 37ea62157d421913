"""What a worker process of a sweep does: it trains one run after another, and ends with the sweep.

A stop signal while a run trains makes that run save. A signal between runs must not kill the
worker, since it may hold a lock of the pool that the other workers wait for: it is noted instead,
and the sweep submits nothing more.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsellm.processes.launched import failure_reason, kill, train_command
from sparsellm.recipe import Recipe
from sparsellm.runs.files import RECIPE_FILE
from sparsellm.runs.lock import ask_to_stop

LOG_FILE = "train.log"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Compiled graphs of one block: gated or not, with or without gradients, dense or sparse, by shape.
_COMPILED_VARIANTS = 64

_training = threading.Lock()
_asked_to_stop = threading.Event()


def begin_worker(places: Any) -> None:
    """Sets the GPU that this worker sees, before CUDA is loaded, and watches over the sweep."""
    place = places.get()
    if place is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place
    _note_signals()
    threading.Thread(target=_end_with_sweep, daemon=True).start()


def work(
    job: Callable[[Recipe, Path | None], float], recipe: Recipe, init_from: Path | None
) -> float:
    """Trains one run by ``job``, unless the worker was asked to stop; returns its seconds."""
    with _training:
        return 0.0 if _asked_to_stop.is_set() else job(recipe, init_from)


def _note_signals() -> None:
    # A function, since processes that this one starts would inherit SIG_IGN.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: _asked_to_stop.set())


def _end_with_sweep() -> None:
    """Ends this worker when the sweep is dead (by SIGKILL, say); its run saves first."""
    sweep = multiprocessing.parent_process()
    assert sweep is not None
    sweep.join()
    os.kill(os.getpid(), signal.SIGTERM)
    with _training:
        os._exit(1)


def train_one(recipe: Recipe, init_from: Path | None) -> float:
    """Trains one run, in a worker; returns its seconds."""
    import torch

    from sparsellm.processes.signals import StopRequest
    from sparsellm.runs.telemetry.session import begin_run
    from sparsellm.training.loop import train

    start_time = time.monotonic()
    begin_run()
    torch._dynamo.config.recompile_limit = _COMPILED_VARIANTS
    recipe.run_path.mkdir(parents=True, exist_ok=True)
    with (
        (recipe.run_path / LOG_FILE).open("a", buffering=1, encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
        StopRequest() as stop,
    ):
        try:
            if not _asked_to_stop.is_set():  # during the imports above, which take seconds
                train(recipe, stop, init_from=init_from)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return time.monotonic() - start_time


def train_launched(recipe: Recipe, init_from: Path | None, gpus: int, config: str) -> float:
    """Trains one run on several of the worker's GPUs, in a worker; returns its seconds.

    Raises:
        ValueError: the launch failed; the message gives the reason.
    """
    from sparsellm.runs.checkpoint import latest

    start_time = time.monotonic()
    recipe.run_path.mkdir(parents=True, exist_ok=True)
    log = recipe.run_path / LOG_FILE
    with tempfile.TemporaryDirectory(prefix="sparsellm-sweep-") as folder, log.open("ab") as file:
        planned = Path(folder) / RECIPE_FILE
        planned.write_text(recipe.to_yaml(), encoding="utf-8")
        resumes = latest(recipe.run_path / "checkpoints") is not None  # its source may be gone
        command = train_command(config, gpus, str(planned), [], None if resumes else init_from)
        at = file.tell()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

        def stop(number: int, frame: object) -> None:
            try:
                ask_to_stop(recipe.run_path)
            except ValueError:  # training has not begun: there is nothing to save
                kill(process)

        for number in STOP_SIGNALS:
            signal.signal(number, stop)
        if _asked_to_stop.is_set():
            kill(process)
        try:
            process.wait()
        finally:
            kill(process)
            _note_signals()
    if process.returncode > 0:
        output = log.read_bytes()[at:].decode(errors="replace")
        raise ValueError(f"the launch failed: {failure_reason(output)}")
    return time.monotonic() - start_time
