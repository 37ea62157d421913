"""Fixtures that every test folder shares."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sparsellm.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from sparsellm.training.run import Run

ROOT = Path(__file__).resolve().parent.parent

# `make test` has three processes that share the cores: none that compile, which import torch.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Loops that torch compiles are compared with what we expect, and vectors take twice as long.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"

_frozen = [0]  # how many modules there were when garbage was last frozen


def _prepare_torch() -> None:
    """In a process that runs tests; the one that hands them out would import it for seconds."""
    import torch

    from sparsellm.ffn.training_path.training_ops import operators_digest

    _read_the_sample_once()
    torch.set_num_threads(1)  # it would start a thread a core in each of the processes
    # As `prepare_blocks` does, for tests that compile by themselves.
    torch.compiler.config.cache_key_tag = operators_digest()
    gc.disable()  # while tests are imported: they leave hardly any garbage


def pytest_collection_finish() -> None:
    """Every run that is closed collects garbage; without what modules hold it takes 0.2 s less."""
    gc.freeze()
    _frozen.append(len(sys.modules))
    gc.enable()


def pytest_runtest_teardown() -> None:
    """The same for modules that tests have imported."""
    if len(sys.modules) > _frozen[-1] + 100:
        gc.collect()
        gc.freeze()
        _frozen.append(len(sys.modules))


def _read_the_sample_once() -> None:
    """Tiny runs train on Python's sources: each would open these hundreds of files five times."""
    from sparsellm.data.text import identity, readers

    library = sysconfig.get_path("stdlib")
    text_of = functools.cache(lambda path: readers.decode(Path(path).read_bytes()))
    content_of = functools.cache(Path.read_bytes)

    def replace(owner: object, name: str, cached: Callable[..., object]) -> None:
        read = getattr(owner, name)

        def read_once(*arguments: object) -> object:
            is_sample = str(arguments[-1]).startswith(library)
            return (cached if is_sample else read)(*arguments)

        setattr(owner, name, read_once)

    replace(readers.TextReader, "_read", lambda _, path: text_of(path))
    replace(identity, "_add_content", lambda digest, path: digest.update(content_of(path)))
    replace(identity, "content_identity", functools.cache(identity.content_identity))


class _FailuresAtOnce:
    """Prints each failure as it happens: a run that is cut off has named those until then."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line for a test; of several processes, where their reports come together."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            report_text = report.longreprtext if crash is None else crash.message
            first, *rest = report_text.strip().splitlines()  # notes on an error come last
            line = " … ".join((first, *rest[-1:]))
            where = "" if crash is None else f"{crash.path}:{crash.lineno}: "
            terminal.write(f"\nFAILED {report.nodeid} ({report.when}): {where}{line}\n", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    """Failures are printed by the process to which those of `pytest -n` report."""
    if config.getoption("dist", "no") == "no":
        _prepare_torch()
    else:
        from warm import start_server

        start_server()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Has each process of `pytest -n` import another part of all tests first.

    What one has compiled, with assertions rewritten, the others then read from its file.
    """
    worker = getattr(session.config, "workerinput", None)
    tests = Path(__file__).parent
    if worker is None or [Path(argument).resolve() for argument in session.config.args] != [tests]:
        return
    files = sorted(tests.rglob("test_*.py"))
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in files[number * len(files) // count :][: len(files) // count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it raises it again
            importlib.import_module(".".join(path.relative_to(tests).with_suffix("").parts))


@pytest.hookimpl(trylast=True)  # of what is not deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders and skips tests.

    Each process of `pytest -n` begins with those of its part that start processes or have a time
    limit of their own: at the end none waits for another one's long test. Those marked `gpu` are
    skipped, with the reason, where there is no CUDA device.
    """
    import torch

    def is_short(item: pytest.Item) -> bool:
        return {"slow", "long", "timeout"}.isdisjoint(mark.name for mark in item.iter_markers())

    long = [item for item in items if not is_short(item)]
    short = [item for item in items if is_short(item)]
    # `pytest --dist worksteal` cuts the list into as many parts.
    num_parts, ordered = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), []
    for remaining in range(num_parts, 0, -1):
        num_long = len(long) // remaining
        num_short = (len(long) + len(short)) // remaining - num_long
        ordered += long[:num_long] + short[:num_short]
        del long[:num_long], short[:num_short]
    items[:] = ordered
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


@pytest.fixture
def process_group() -> Iterator[None]:
    """A gloo group of this process alone.

    What the test wrapped in DDP is gone before the group is destroyed: were DDP's reducer the
    group's last owner, it would join gloo's threads while holding the GIL, which one may wait for.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real text and benchmark splits (SPARSELLM_TEST_DATA)."""
    folder = Path(os.environ.get("SPARSELLM_TEST_DATA", ROOT.parent / "shared" / "data")).resolve()
    if not (folder / "corpus").is_dir():
        pytest.skip(f"real test data is absent: {folder}; set SPARSELLM_TEST_DATA to its folder")
    return folder


@pytest.fixture
def gpt2_cache(test_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """tiktoken reads the GPT-2 ranks from the test data instead of downloading them."""
    cache = test_data / "tiktoken_cache"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    return cache


TINY = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=2",
    "model.context_length=32",
    "train.global_batch_tokens=256",
    "train.micro_batch_size=2",
    "train.steps=4",
    "sparsity.dead_window_tokens=512",
    "optimizer.warmup_steps=2",
    "validation.tokens=512",
    "validation.every_steps=4",
    "checkpoint.every_steps=2",
    "logging.every_steps=1",
    "data.num_workers=0",
]


@pytest.fixture
def tiny_overrides(tmp_path: Path) -> list[str]:
    """``--set`` values that make the debug recipe a model of a second, in a folder of its own."""
    return [*TINY, f"logging.run_dir={tmp_path / 'runs'}"]


@pytest.fixture
def tiny(tiny_overrides: list[str]) -> Callable[..., Recipe]:
    """Builds the tiny recipe with further overrides."""
    return lambda *overrides: load_recipe("debug", [*tiny_overrides, *overrides])


@pytest.fixture
def build(tiny: Callable[..., Recipe]) -> Iterator[Callable[..., Run]]:
    """Builds runs of the tiny recipe with further overrides, which are closed after the test."""
    from sparsellm.training.run import build_run, close_run

    runs: list[Run] = []

    def build_one(*overrides: str) -> Run:
        runs.append(build_run(tiny(*overrides)))
        return runs[-1]

    yield build_one
    for run in runs:
        close_run(run)


@pytest.fixture
def suite_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark suite is two tasks of it, which are built in a third of the time."""
    from sparsellm.evaluate import suite
    from sparsellm.paths import bundled

    folder = shutil.copytree(bundled("eval"), tmp_path / "eval")
    content = yaml.safe_load((folder / "suite.yaml").read_text())
    content["tasks"] = {name: content["tasks"][name] for name in ("piqa", "winogrande")}
    (folder / "suite.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(suite, "bundled", lambda name: tmp_path / name)


@pytest.fixture
def cli_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the ``sparsellm`` command within this process, which saves seconds of imports.

    It must end with the exit status ``status``.
    """
    from sparsellm.cli import main

    for name, value in CHILDREN.items():
        monkeypatch.setenv(name, value)  # for what the command itself starts

    def run(*words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        ended = main([str(word) for word in words])
        printed = capsys.readouterr()
        return completed(words, ended, printed.out, printed.err, status)

    return run


@pytest.fixture
def error_of(cli_here: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """The one line of a ``sparsellm`` command that refuses a user's mistake."""

    def run(*words: object) -> str:
        (line,) = cli_here(*words, status=1).stderr.splitlines()
        assert line.startswith("error: ")
        return line

    return run


class Training:
    """A run of ``sparsellm train debug``: what the command printed, and what lies on disk."""

    def __init__(self, done: subprocess.CompletedProcess[str], overrides: list[str]) -> None:
        self.stdout, self.stderr, self._overrides = done.stdout, done.stderr, overrides

    @functools.cached_property
    def recipe(self) -> Recipe:
        """With the overrides of the command."""
        return load_recipe("debug", self._overrides)

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.recipe.run_path

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of a step, which need not exist."""
        return self.path / "checkpoints" / f"step_{step:08d}"

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the run has recorded."""
        from sparsellm.runs.telemetry.records import read_metrics

        return read_metrics(self.path, kind)

    def losses(self) -> list[float]:
        """Of its steps and validations."""
        return [record["loss"] for record in self.records() if "loss" in record]


@pytest.fixture
def train(
    tiny_overrides: list[str], cli_here: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[..., Training]:
    """Trains the tiny recipe by the command within this process, to the exit status ``status``.

    Words are further overrides, or options such as ``--fresh`` and ``--resume=PATH``.
    """

    def run(*words: str, status: int = 0) -> Training:
        options = [word for word in words if word.startswith("--")]
        overrides = [*tiny_overrides, *(word for word in words if not word.startswith("--"))]
        words = ("train", "debug", *options, *set_arguments(overrides))
        return Training(cli_here(*words, status=status), overrides)

    return run


@pytest.fixture
def train_on(tiny_overrides: list[str]) -> Callable[..., Training]:
    """Trains the tiny recipe on so many ranks, each a process of its own; see `warm.ranks`.

    ``program`` takes the words of the command in place of ``sparsellm``.
    """
    from warm import ranks

    def run(
        number: int, *overrides: str, program: Sequence[str] = ("-m", "sparsellm"), config: str = ""
    ) -> Training:
        settings = [*tiny_overrides, *overrides]
        words = (*program, "train", "debug", *set_arguments(settings))
        return Training(ranks(number, *words, config=config), settings)

    return run


@pytest.fixture(autouse=True)
def _no_progress_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine is does not change what a command prints within this process."""
    monkeypatch.setattr("sparsellm.waiting.QUIET_SECONDS", threading.TIMEOUT_MAX)


@pytest.fixture
def sample_of_text() -> None:
    """A training within this process ends with text that its model writes, as for users."""


@pytest.fixture(autouse=True)
def _no_sample(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do not: it would be a sixth of the time of a tiny run."""
    if "sample_of_text" not in request.fixturenames:
        monkeypatch.setattr("sparsellm.cli.command._write_sample", lambda *_: None)


# The sparse path trains on a CPU here, by `ffn.reference`; users are told to take `auto`.
os.environ["SPARSELLM_REFERENCE_KERNELS"] = "1"
CHILDREN = {  # one thread, no processes that compile, no network
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def process_env(**extra: str) -> dict[str, str]:
    """The environment of a child process."""
    return os.environ | CHILDREN | extra


def completed(
    words: Sequence[object], ended: int, out: str, errors: str, status: int | None
) -> subprocess.CompletedProcess[str]:
    """What has run, which must have ended with ``status``; None takes any."""
    assert status in (ended, None), f"{words} ended with {ended}: {out[-3000:]}{errors[-3000:]}"
    return subprocess.CompletedProcess(words, ended, out, errors)


def python(
    *words: object, status: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these words to its end, in a process of its own; see `completed`."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=process_env(**environment)
    )
    return completed(words, done.returncode, done.stdout, done.stderr, status)


def set_arguments(overrides: list[str]) -> list[str]:
    """``--set`` flags for the command line."""
    return [part for override in overrides for part in ("--set", override)]


def train_recipe(recipe: Recipe, **options: object) -> Path:
    """Trains a run within this process by `training.loop.train`; returns its last checkpoint."""
    from sparsellm.processes.signals import StopRequest
    from sparsellm.training.loop import train

    with StopRequest() as stop:
        train(recipe, stop, **options)
    return recipe.run_path / "checkpoints" / f"step_{recipe.train.steps:08d}"


def checkpoint_of(recipe: Recipe, steps: int = 1) -> Path:
    """A checkpoint of a run of this recipe after so many steps."""
    from sparsellm.processes.signals import StopRequest
    from sparsellm.training.run import build_run, close_run
    from sparsellm.training.step import train_step

    run = build_run(recipe)
    for _ in range(steps):
        train_step(run, StopRequest())
    path = save_run(run)
    close_run(run)
    return path


def save_run(run: Run) -> Path:
    """Writes a checkpoint of a run, and waits until it is published."""
    from sparsellm.training.resume.run_state import begin_save

    begin_save(run)
    path = run.saver.wait()
    assert path is not None
    return path
