"""Two trainings never share a run folder, and a dead one does not keep it."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import psutil
import pytest
from conftest import process_env, python

from sparsellm.runs import lock as lock_module
from sparsellm.runs.lock import Presence, RunLock, ask_to_stop, find

HOLDER = """
import sys, time
from pathlib import Path
from sparsellm.runs.lock import RunLock
lock = RunLock(Path(sys.argv[1]), print, print)
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def impatient(monkeypatch):
    """Renews and gives up in tenths of seconds."""
    monkeypatch.setattr(lock_module, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 0.6)
    monkeypatch.setattr(lock_module, "_WATCH_SECONDS", 0.05)


@pytest.fixture
def elsewhere(monkeypatch):
    """No holder is on this host."""
    monkeypatch.setattr(Presence, "is_here", property(lambda self: False))


@pytest.fixture
def holder(path):
    """A process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=process_env())
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def _quiet(*arguments):
    """Says nothing."""


def _lock(path):
    return RunLock(path, _quiet, _quiet)


def _take(path):
    lock = _lock(path)
    lock.acquire()
    lock.release()


def _leave_lock(path, **changes):
    path.mkdir(exist_ok=True)
    content = Presence.within(path, "left").model_dump() | changes
    (path / "running.json").write_text(json.dumps(content))


def test_a_second_training_is_refused_until_the_first_is_dead(path, holder):
    second = _lock(path)
    with pytest.raises(ValueError, match=rf"is being trained: process {holder.pid} on host"):
        second.acquire()
    assert find(path).pid == holder.pid
    holder.kill()
    holder.wait()
    second.acquire()
    assert find(path).pid == os.getpid()
    second.release()
    assert not path.exists()  # nothing was written


def test_a_process_of_the_same_number_is_not_the_holder(path):
    _leave_lock(path, created=1.0)  # of before the host was started again
    _take(path)


def test_a_holder_lives_although_the_clock_was_set(path, holder, monkeypatch):
    """psutil and Linux derive the times of boot and of a process's start from the present clock."""
    booted = psutil.boot_time()
    for seconds in (-3600, 1, 7):
        monkeypatch.setattr(psutil._psplatform, "boot_time", lambda s=seconds: booted + s)
        assert find(path).process.pid == holder.pid
        with pytest.raises(ValueError, match=rf"is being trained: process {holder.pid} on host"):
            _lock(path).acquire()


def test_a_copy_of_the_folder_is_not_trained_by_the_originals_process(path, tmp_path):
    first = _lock(path)
    first.acquire()
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    with pytest.raises(ValueError, match=rf"its running.json was copied from {path}"):
        ask_to_stop(copy)
    second = _lock(copy)
    second.acquire()
    assert find(copy).id != find(path).id
    second.release()
    renamed = path.rename(tmp_path / "renamed")
    with pytest.raises(ValueError, match=r"is being trained"):
        _lock(renamed).acquire()
    renamed.rename(path)
    first.release()


def test_remains_of_killed_processes_do_not_stay(path):
    path.mkdir()
    (path / ".tmp-taking-1234").touch()
    lock = _lock(path)
    lock.acquire()
    assert [p.name for p in path.iterdir()] == ["running.json"]
    lock.release()
    assert not path.exists()


def test_a_process_that_nobody_waits_for_has_stopped(path, holder):
    python("-m", "sparsellm", "stop", path)
    assert psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(ValueError, match=r"no process trains"):
        ask_to_stop(path)
    _take(path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 3}'])
def test_a_damaged_lock_is_watched_and_taken(path, impatient, content):
    path.mkdir()
    (path / "running.json").write_text(content)
    lines = []
    lock = RunLock(path, lines.append, _quiet)
    lock.acquire()
    assert "waiting for a sign of life of whoever wrote" in lines[0]
    lock.release()


def test_a_lock_that_a_killed_process_left_empty_is_taken_soon(path, impatient, monkeypatch):
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 60.0)
    path.mkdir()
    (path / "running.json").touch()
    started = time.monotonic()
    _take(path)
    assert time.monotonic() - started < 30


def test_a_lock_that_is_filled_meanwhile_is_anothers(path, impatient, monkeypatch):
    monkeypatch.setattr(lock_module, "RENEW_SECONDS", 60.0)
    path.mkdir()
    (path / "running.json").touch()
    writer = threading.Timer(0.2, _leave_lock, [path], {"pid": os.getpid()})
    writer.start()
    with pytest.raises(ValueError, match="is being trained"):
        _lock(path).acquire()
    writer.join()


def test_another_hosts_lock_is_taken_only_if_it_is_not_renewed(
    path, impatient, elsewhere, monkeypatch
):
    first = _lock(path)
    first.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(lock_module, "STALE_SECONDS", 60.0)  # a busy machine may renew it late
        with pytest.raises(ValueError, match=r"--set name=NEW"):
            _take(path)
    first._ended.set()  # as if its host were gone: the file stays
    first._thread.join()
    started = time.monotonic()
    _take(path)
    assert time.monotonic() - started > 0.5


def test_who_stood_still_hears_that_the_lock_is_anothers(path, impatient, elsewhere):
    lost = []
    first = RunLock(path, _quiet, lost.append)
    first.acquire()
    _leave_lock(path, pid=7, id="another")
    for _ in range(100):
        if lost:
            break
        time.sleep(0.05)
    assert lost[0].pid == 7
    first.release()
    assert find(path).id == "another"  # and it is left alone


def test_of_many_that_find_a_dead_holder_one_gets_the_lock(path):
    for _ in range(30):
        _leave_lock(path, created=1.0)
        won, refused = [], []
        barrier = threading.Barrier(8)

        def contend(won=won, refused=refused, barrier=barrier):
            lock = _lock(path)
            barrier.wait()
            try:
                lock.acquire()
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


def test_who_died_while_taking_a_lock_away_does_not_keep_it(path, impatient):
    _leave_lock(path, created=1.0)
    digest = hashlib.sha256((path / "running.json").read_bytes()).hexdigest()
    (path / f".tmp-taking-{digest[:16]}").touch()
    _take(path)
    assert not path.exists()


def test_on_a_full_disk_no_lock_stays(path, monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Presence, "model_dump_json", full)
        with pytest.raises(OSError, match=r"No space left"):
            _take(path)
    assert list(path.iterdir()) == []
    _take(path)


def test_training_takes_the_lock_also_with_fresh_and_frees_it(train):
    run_path = train().path
    before = sorted(run_path.rglob("*"))
    other = _lock(run_path)
    other.acquire()
    for options in ((), ("--fresh",), (f"--resume={run_path}",)):
        refused = train(*options, status=1).stderr
        assert f"{run_path} is being trained: process {os.getpid()}" in refused
    other.release()
    assert sorted(run_path.rglob("*")) == before
    train("--fresh")
    for place in (run_path, run_path.with_name("debug.1")):
        assert not (place / "running.json").exists()
