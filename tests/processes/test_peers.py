"""A rank that fails, is killed or loses its launcher: one message, and the others end."""

import re
import signal
import socket
import time

import psutil
import pytest
from conftest import ROOT, set_arguments
from rank_processes import processes_with, wait_until_gone
from warm import launch, launched

from sparsellm.recipe import load_recipe
from sparsellm.runs import checkpoint
from sparsellm.runs.telemetry.records import METRICS_FILE

FAULTY = ROOT / "tests" / "training" / "faulty_rank.py"


def _launch(overrides, kind, status=1):
    """Rank 1 of 2 meets the fault before its fourth step."""
    settings = [*overrides, "train.steps=100000", "train.micro_batch_size=1", f"name={kind}"]
    settings += ["checkpoint.every_steps=100000", "validation.every_steps=0"]
    program = (str(FAULTY), kind, "1", "3", "train", "--recipe", "debug")
    return launched(*program, *set_arguments(settings), status=status)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "error (rank 1): RuntimeError: injected fault"),
        pytest.param(  # as below, in another moment
            "kill",
            "ended without a word (killed, or out of memory?); the other ranks end too",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "data", "error (rank 1): shard 7 is missing; restore it", marks=pytest.mark.long
        ),
    ],
)
def test_one_rank_tells_its_error_and_the_others_end(tiny_overrides, kind, message):
    failed = _launch(tiny_overrides, kind)
    stderr, _, launcher = failed.stderr.partition("torch/distributed/elastic")
    if kind != "kill":  # the launcher sees that before the other rank does
        assert stderr.count("error (rank") == stderr.count(message) == 1, stderr
        assert launcher.split("Root Cause")[1].count(message) == 1
    assert failed.stderr.count("Traceback") == 1 + (kind == "raise")  # the launcher's own
    assert message in failed.stderr
    # What was whole when the data ended is saved; a rank that is gone leaves nothing to save.
    assert ("saved" in failed.stdout) == (kind == "data")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_killed_while_it_saves_ends_the_others(tiny_overrides, rank):
    """The others train on meanwhile, and a thread of each waits for all parts to be written."""
    settings = [*tiny_overrides, "train.steps=100000", "train.micro_batch_size=1", "name=killed"]
    settings += ["validation.every_steps=0"]  # saves after every second step
    program = [str(FAULTY), "kill-save", str(rank), "1", "train", "--recipe", "debug"]
    failed = launched(*program, *set_arguments(settings), status=1)
    end_time = time.time()
    # torchrun repeats the line in its own summary, indented.
    [line] = [line for line in failed.stderr.splitlines() if line.startswith("error")]
    assert f"rank {rank} (" in line
    assert "ended without a word (killed, or out of memory?)" in line
    assert failed.stderr.count("Traceback") == 1  # the launcher's own
    run_path = load_recipe("debug", settings).run_path
    assert end_time - (run_path / METRICS_FILE).stat().st_mtime < 30
    assert not processes_with(f"logging.run_dir={run_path.parent}")
    # The save before is whole, and no trace of the other is taken for one.
    path = checkpoint.latest(run_path / "checkpoints")
    assert checkpoint.load(path).step == 2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sleep", "freeze"])
def test_a_rank_that_keeps_the_others_waiting_is_named_before_the_timeout(
    tiny_overrides, monkeypatch, kind
):
    monkeypatch.setenv("SPARSELLM_TEST_PATIENCE", "12")
    began = time.monotonic()
    failed = _launch([*tiny_overrides, "runtime.timeout_minutes=2"], kind)
    assert time.monotonic() - began < 110  # less than the timeout of the collective
    stderr = failed.stderr.partition("torch/distributed/elastic")[0]
    assert stderr.count("error:") == 1, stderr
    assert "Traceback" not in stderr
    if kind == "sleep":  # its watching thread lives: what it does is known
        assert stderr.count("runtime.timeout_minutes 2") == 1
        assert re.search(r"step 4 has not ended after 1\d s\. rank 1 \(\S+ process \d+\): ", stderr)
        assert re.search(r"rank 0 \(\S+ process \d+\): waiting for others for 1\d s", stderr)
        # Named while there is hope, too, and then ever more rarely.
        assert failed.stdout.count("warning: step 4 has not ended") in (1, 2)
    else:
        assert re.search(r"rank 1 \(\S+ process \d+\) gave no sign of life for 12 s", stderr)


@pytest.mark.long
def test_a_validation_that_fails_on_one_rank_leaves_none_waiting(tiny_overrides):
    settings = [*tiny_overrides, "train.micro_batch_size=1", "name=validated"]
    arguments = ["train", "--recipe", "debug", *set_arguments(settings)]
    done = launched(str(FAULTY), "validation", "1", "0", *arguments)
    assert done.stderr.count("injected fault of a validation") == 1
    assert "done: 4 steps" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.long)])
def test_without_the_main_ranks_launcher_the_others_say_so(tiny_overrides, tmp_path, hangs):
    """Two nodes; the first one's launcher has the store by which ranks tell one another.

    The main rank ends with its launcher. If that takes it long, it is not the other's main thread
    that says so, but the one that watches.
    """
    settings = [*tiny_overrides, "train.steps=100000", "train.micro_batch_size=1", "name=two-nodes"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    arguments = ["--num_machines=2", "--num_processes=2", "--main_process_ip=localhost"]
    arguments.append(f"--main_process_port={port}")
    program = ["-m", "sparsellm", "train", "--recipe", "debug", *set_arguments(settings)]
    nodes = []
    for rank in range(2):
        output = tmp_path / f"node{rank}"
        words = [*arguments, f"--machine_rank={rank}", *program]
        nodes.append(launch(1, *words, out=output, errors=output))
    end = time.monotonic() + 120
    while "step      2/" not in (printed := (tmp_path / "node0").read_text()):
        assert time.monotonic() < end, printed
        time.sleep(0.1)
    [main_rank] = psutil.Process(nodes[0].pid).children()
    if hangs:
        main_rank.suspend()
    nodes[0].send_signal(signal.SIGKILL)
    nodes[0].wait()
    try:
        assert nodes[1].wait(timeout=120) == 1
    finally:
        if hangs:
            main_rank.resume()
    printed = (tmp_path / "node1").read_text()
    speakers = re.findall(r"^error( \(rank 1\))?: the main rank is gone \(", printed, re.MULTILINE)
    assert len(speakers) == 1, printed
    assert not (hangs and speakers[0])
    assert printed.count("Traceback") == 1  # the launcher's own
    assert not wait_until_gone(processes_with(f"logging.run_dir={tmp_path / 'runs'}"), 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["launcher", pytest.param("early-launcher", marks=pytest.mark.long)]
)
def test_ranks_end_when_their_launcher_is_gone(tiny_overrides, tmp_path, kind):
    """At the start, too, when they would look for one another in a store that is no more."""
    _launch(tiny_overrides, kind, status=-9)
    assert not wait_until_gone(processes_with(f"logging.run_dir={tmp_path / 'runs'}"), 20)
