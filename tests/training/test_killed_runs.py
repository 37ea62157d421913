"""Runs that are killed and resumed: what is killed, and what is claimed afterwards."""

import json
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT, process_env, set_arguments
from killed_runs import kill_steps
from rank_processes import LAUNCHER, processes_with, ranks_of

from sparsellm.processes import launched

PROGRAM = ROOT / "tests" / "killed_runs.py"
# Every rank starts a helper whose path has the program's name, as a checkout's compilers have.
SITE = """
    import os, subprocess, sys
    if "RANK" in os.environ and "HELPED" not in os.environ:
        os.environ["HELPED"] = "1"
        subprocess.Popen([sys.executable, {helper!r}])
"""
HELPER = """
    import os, time
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.1)
"""


def test_kills_come_before_the_end_and_after_a_checkpoint():
    assert kill_steps(24, 5, 3) == [4, 8, 12, 16, 20]
    assert kill_steps(12, 5, 3) == [2, 4, 6, 8, 10]
    for steps, kills, every in ((5, 5, 1), (6, 5, 3), (3, 1, 1), (8, 1, 3)):
        with pytest.raises(ValueError, match="too few"):
            kill_steps(steps, kills, every)


RANK = """
    import os, subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "/x/sparsellm/helper"])
    os.fork()
    print("here", flush=True)
    time.sleep(60)
"""


def test_helpers_of_a_rank_are_no_ranks(tmp_path):
    word = f"logging.run_dir={tmp_path}"
    rank = [sys.executable, "-c", textwrap.dedent(RANK), "--set", word]
    start = f"import subprocess; subprocess.run({rank!r})"
    command = [sys.executable, "-c", start, LAUNCHER, "--set", word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout.read(2 * len("here\n")).count("here") == 2  # the two may mix
            [process] = ranks_of(word)
            assert process.ppid() == launcher.pid
            assert len(processes_with(word)) == 3  # the launcher, the rank and what it forked
        finally:
            launched.kill(launcher)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_run_ends_as_one_left_alone(tmp_path):
    helper = tmp_path / "sparsellm" / "helper.py"
    site = tmp_path / "site" / "sitecustomize.py"
    for path, text in ((helper, HELPER), (site, SITE.format(helper=str(helper)))):
        path.parent.mkdir()
        path.write_text(textwrap.dedent(text))
    folder = tmp_path / "killed"
    # Steps must not be over before a kill can come.
    arguments = ["train.global_batch_tokens=2048", "train.micro_batch_size=4", "data.num_workers=1"]
    command = [sys.executable, str(PROGRAM), str(folder), "--config=ddp8", "--recipe=debug"]
    command += ["--kills=2", "--steps=6", "--every=1", *set_arguments(arguments)]
    environment = process_env(PYTHONPATH=f"{site.parent}:{ROOT}")

    def call(*options):
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, check=False, env=environment
        )

    part = call("--seconds=1")  # time for one launch: the rest is done by the same command
    assert part.returncode == 75, part.stdout + part.stderr
    assert part.stdout.count("undisturbed: ended") == 1
    assert not (folder / "kills.jsonl").exists()
    whole = call()
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert whole.stdout.count("undisturbed: ended") == 0  # it had
    kills = [json.loads(line) for line in (folder / "kills.jsonl").read_text().splitlines()]
    assert [kill["who"] for kill in kills] == ["one rank", "all ranks"]
    assert all(kill["after"] < 6 for kill in kills)
    assert "2 kills: all 6 steps once" in whole.stdout
    assert "losses within 0.00e+00 (relative) of an undisturbed run, another" in whole.stdout
    alone = (folder / "kill-1.log").read_text()
    assert alone.count("ended without a word") + alone.count("Signal 9 (SIGKILL)") >= 1

    # More kills than were made cannot be claimed once the run has ended.
    more = call("--kills=3")
    assert more.returncode == 1
    assert "2 of 3 kills were made" in more.stderr
    assert "3 kills" not in more.stdout
