"""Two trainings never share a run folder, and a dead one does not keep it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from conftest import process_env, set_arguments

from sparsellm.recipe import load_recipe
from sparsellm.runs import lock as lock_module
from sparsellm.runs.lock import Presence, RunLock, ask_to_stop, find

HOLDER = """
import os, sys, time
from pathlib import Path
from sparsellm.runs import lock as lock_module
lock_module.RENEW_SECONDS, lock_module.STALE_SECONDS = map(float, sys.argv[3:5])
lock = lock_module.RunLock(Path(sys.argv[1]), lambda: print("lost", flush=True))
lock.acquire(print)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
os._exit(0)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def impatient(monkeypatch):
    """Renews and gives up in tenths of seconds."""
    monkeypatch.setattr(lock_module, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 0.6)
    monkeypatch.setattr("sparsellm.waiting.QUIET_SECONDS", 0.01)


@pytest.fixture
def elsewhere(monkeypatch):
    """No holder is on this host."""
    monkeypatch.setattr(Presence, "is_here", property(lambda self: False))
    monkeypatch.setattr("filelock._lease.owner_is_stale", lambda *owner: False)


def _quiet(*arguments):
    """Says nothing."""


def _hold(path, seconds=60):
    """Another process holds the lock, and ends without releasing it."""
    times = (lock_module.RENEW_SECONDS, lock_module.STALE_SECONDS)
    command = [sys.executable, "-c", HOLDER, str(path), *map(str, (seconds, *times))]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=process_env())
    assert holder.stdout.readline() == "held\n"
    return holder


def _leave_lock(path):
    """What a killed process leaves."""
    assert _hold(path, seconds=0).wait() == 0
    assert sorted(p.name for p in path.iterdir()) == ["running.json", "running.lock"]


def test_a_second_training_is_refused_until_the_first_is_dead(path):
    holder = _hold(path)
    try:
        second = RunLock(path, _quiet)
        with pytest.raises(ValueError, match=rf"is being trained: process {holder.pid} on host"):
            second.acquire(_quiet)
        assert find(path).pid == holder.pid
        holder.kill()
        holder.wait()
        second.acquire(_quiet)
        assert find(path).pid == os.getpid()
        second.release()
        assert not path.exists()  # nothing was written
    finally:
        holder.kill()


def test_a_copy_of_the_folder_is_not_trained_by_the_originals_process(path, tmp_path, impatient):
    first = RunLock(path, _quiet)
    first.acquire(_quiet)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    with pytest.raises(ValueError, match=rf"its running.json was copied from {path}"):
        ask_to_stop(copy)
    second = RunLock(copy, _quiet)
    second.acquire(_quiet)
    assert (find(copy).folder, find(path).folder) == (str(copy), str(path))
    second.release()
    renamed = path.rename(tmp_path / "renamed")
    with pytest.raises(ValueError, match=r"is being trained"):
        RunLock(renamed, _quiet).acquire(_quiet)
    renamed.rename(path)
    first.release()


def test_a_process_that_nobody_waits_for_has_stopped(path, cli, impatient):
    holder = _hold(path)
    try:
        stopped = cli("stop", str(path), timeout=60)
        assert stopped.returncode == 0, stopped.stderr
        assert psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE
        with pytest.raises(ValueError, match=r"no process trains"):
            ask_to_stop(path)
        lock = RunLock(path, _quiet)
        lock.acquire(_quiet)
        lock.release()
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize("content", ["{", "[]", '{"host": 3}'])
def test_a_damaged_lock_is_watched_and_taken(path, impatient, monkeypatch, content):
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 3.0)
    path.mkdir()
    for name in ("running.json", "running.lock"):
        (path / name).write_text(content)
    lines = []
    lock = RunLock(path, _quiet)
    lock.acquire(lines.append)
    assert "for a sign of life of whoever wrote" in lines[0]
    lock.release()


def test_of_a_lock_that_says_nothing_the_remedy_is_said(path, impatient):
    path.mkdir()
    (path / "running.lock").touch()  # somebody may be about to fill it
    with pytest.raises(ValueError, match=r"If nothing trains there, delete that file"):
        RunLock(path, _quiet).acquire(_quiet)
    assert (path / "running.lock").exists()


def test_another_hosts_lock_is_taken_only_if_it_is_not_renewed(path, impatient, elsewhere):
    holder = _hold(path)
    try:
        with pytest.raises(ValueError, match=r"--set name=NEW"):
            RunLock(path, _quiet).acquire(_quiet)
    finally:
        holder.kill()
        holder.wait()
    started = time.monotonic()
    lock = RunLock(path, _quiet)
    lock.acquire(_quiet)
    assert time.monotonic() - started > 0.5
    lock.release()


def test_who_stood_still_hears_that_the_lock_is_anothers(path, impatient, elsewhere):
    holder, lost = _hold(path), threading.Event()
    try:
        holder.send_signal(signal.SIGSTOP)
        first = RunLock(path, lost.set)
        first.acquire(_quiet)
        assert find(path).pid == os.getpid()
        holder.send_signal(signal.SIGCONT)
        assert "lost" in holder.stdout.readline()
        assert not lost.is_set()
        assert find(path).pid == os.getpid()  # and it is left alone
        first.release()
        assert not path.exists()
    finally:
        holder.kill()
        holder.wait()


def test_who_has_lost_the_lock_leaves_it_alone(path, impatient):
    lost = threading.Event()
    first = RunLock(path, lost.set)
    first.acquire(_quiet)
    for name in ("running.json", "running.lock"):
        (path / name).unlink()
    assert lost.wait(10)
    second = RunLock(path, _quiet)
    second.acquire(_quiet)
    first.release()
    assert find(path).pid == os.getpid()
    second.release()


def test_of_many_that_find_a_dead_holder_one_gets_the_lock(path, impatient):
    for _ in range(4):
        _leave_lock(path)
        won, refused = [], []
        barrier = threading.Barrier(8)

        def contend(won=won, refused=refused, barrier=barrier):
            lock = RunLock(path, _quiet)
            barrier.wait()
            try:
                lock.acquire(_quiet)
                won.append(lock)
            except ValueError:
                refused.append(lock)

        threads = [threading.Thread(target=contend) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(refused)) == (1, 7)
        won[0].release()
    assert not path.exists()


def test_on_a_full_disk_no_lock_stays(path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = RunLock(path, _quiet)
    with monkeypatch.context() as patch:
        patch.setattr(lock_module, "write_atomically", full)
        with pytest.raises(OSError, match=r"No space left"):
            lock.acquire(_quiet)
    assert list(path.iterdir()) == []
    lock.acquire(_quiet)
    lock.release()


def test_training_takes_the_lock_also_with_fresh_and_frees_it(tiny_overrides, cli_here):
    own = ["train", "--recipe", "debug", *set_arguments(tiny_overrides)]
    run_path = load_recipe("debug", tiny_overrides).run_path
    assert cli_here(*own).returncode == 0
    before = sorted(run_path.rglob("*"))
    other = RunLock(run_path, _quiet)
    other.acquire(_quiet)
    for further in ((), ("--fresh",), ("--resume", str(run_path))):
        refused = cli_here(*own, *further)
        assert refused.returncode == 1
        assert f"{run_path} is being trained: process {os.getpid()}" in refused.stderr
    other.release()
    assert sorted(run_path.rglob("*")) == before
    fresh = cli_here(*own, "--fresh")
    assert fresh.returncode == 0, fresh.stderr
    for place in (run_path, run_path.with_name("debug.1")):
        assert not list(place.glob("running.*"))
