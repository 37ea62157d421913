"""A run on two ranks for the soak: its processes, and what they said."""

import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
from conftest import ROOT, TINY, process_env, set_arguments
from rank_processes import ranks_of

from sparsellm.runs import checkpoint
from sparsellm.runs.telemetry.records import METRICS_FILE

FAULTY = Path(__file__).parent / "training" / "faulty_rank.py"
END_SECONDS = 150  # in which all processes must have ended after a fault
VALIDATION = 7
TEXTS = {"files": "train", "validation_files": "held-out"}
PATIENCE = 30  # seconds that ranks wait for one that stalls
OVERRIDES = [
    *TINY,
    "train.micro_batch_size=1",
    "train.on_nonfinite=skip",
    "train.spike_threshold=30",  # the gradient of these texts grows tenfold by step 223
    "data.num_workers=1",
    "optimizer.min_lr_ratio=1",  # the same rate however long it will be
    f"validation.every_steps={VALIDATION}",
    "validation.tokens=512",
    "checkpoint.every_steps=10",
    "runtime.timeout_minutes=2",
]


class Session:
    """One `accelerate launch` of a run, of two ranks that may meet a fault.

    Args:
        folder: of the runs.
        name: of the run.
        fault: of `faulty_rank`, on one rank, after some steps.
        rank: that meets it.
        steps: after which it does; of ``elsewhere``, the folder.
        arguments: further ones of `sparsellm train`.
        environment: further variables.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        fault: str = "none",
        rank: int = 0,
        steps: int | Path = 0,
        arguments: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0"]
        command += [f"--config_file={ROOT / 'launch' / 'ddp8.yaml'}", "--num_processes=2"]
        command += [str(FAULTY), fault, str(rank), str(steps), "train", "--recipe", "debug"]
        settings = [*OVERRIDES, "train.steps=1000000", f"logging.run_dir={folder}", f"name={name}"]
        settings += _texts(folder)
        self.run_path = folder / name
        self._mark = f"logging.run_dir={folder}"
        self._log = folder / f"{name}.log"
        self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        damage = {"SPARSELLM_TEST_DAMAGE": "1", "SPARSELLM_TEST_PATIENCE": str(PATIENCE)}
        with self._log.open("ab") as log:  # by a process that no full disk of a rank's concerns
            writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
        assert writer.stdin is not None
        self._process = subprocess.Popen(
            [*command, *set_arguments(settings), *arguments],
            stdout=writer.stdin,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=process_env(**damage, **(environment or {})),
            start_new_session=True,
        )
        writer.stdin.close()

    @property
    def alive(self) -> bool:
        """Whether the launcher is."""
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Of the launcher, once it has ended."""
        return self._process.poll()

    @property
    def said(self) -> str:
        """All that this session has printed so far."""
        with self._log.open("rb") as log:
            log.seek(self._log_begin)
            return log.read().decode(errors="replace")

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, of this session and of others in the folder."""
        return ranks_of(self._mark)

    def until_training(self, chance: random.Random, early: float = 0.2) -> str:
        """Waits until it records steps, or, by chance, a few seconds; returns what is wrong."""
        if chance.random() < early:
            time.sleep(chance.uniform(0, 12))
            return ""
        metrics = self.run_path / METRICS_FILE
        before = metrics.stat().st_mtime if metrics.exists() else 0.0
        end = time.monotonic() + 150
        while self.alive and time.monotonic() < end:
            if metrics.exists() and metrics.stat().st_mtime > before:
                return ""
            time.sleep(0.05)
        return "a session did not begin to train within 150 s" if self.alive else ""

    def wait(self, seconds: float) -> bool:
        """Whether it ends by itself within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.alive

    def signal(self, number: int, processes: list[psutil.Process]) -> None:
        """Sends it to these, or, before there are any, to the launcher."""
        for process in processes or [self._process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.send_signal(number)

    def kill_launcher(self) -> None:
        """Alone."""
        self._process.kill()

    def all_end(self) -> bool:
        """Whether all processes end in time; then they are killed."""
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end:
            if not self.alive and not self.ranks():
                return True
            time.sleep(0.1)
        for process in self.ranks():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.alive:
            self._process.kill()
        return False


def _texts(folder: Path) -> list[str]:
    """Python's own sources; each rank reads what lies in the folder where it works."""
    sources = sorted(Path(json.__file__).parents[1].glob("*.py"))
    for name, paths in zip(TEXTS.values(), (sources[:-20], sources[-20:]), strict=True):
        if not (folder / name).exists():
            lines = [json.dumps({"text": path.read_text(encoding="utf-8")}) for path in paths]
            (folder / name).write_text("\n".join(lines) + "\n")
            (folder / f"{name}.jsonl").symlink_to(f"/proc/self/cwd/{name}")
    return ["data.corpus=local", *(f"data.{k}=[{folder}/{n}.jsonl]" for k, n in TEXTS.items())]


def last_step(run_path: Path) -> int:
    """Of the newest checkpoint, whatever its folder is called."""
    newest = checkpoint.latest(run_path / "checkpoints")
    return (checkpoint.complete_step(newest) if newest else None) or 0
