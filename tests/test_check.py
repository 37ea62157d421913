"""`make check` runs the tests of what changed, for as long as it may."""

import os
import subprocess
from types import SimpleNamespace

import pytest
from check import TimeLimit, changed_files, nearest_tests
from conftest import ROOT


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("sparsellm/ffn/training_path/capacity.py", ["ffn/test_capacity.py", "ffn"]),
        ("sparsellm/runs/telemetry/metrics.py", ["runs"]),
        ("sparsellm/runs/lock.py", ["runs/test_lock.py", "runs"]),
        ("sparsellm/model.py", ["test_model.py"]),
        ("sparsellm/cli/command.py", ["test_cli.py"]),
        ("tests/data/test_hub.py", ["data/test_hub.py"]),
        ("tests/data/fake_hub.py", ["data"]),
        ("tests/data/test_that_was_deleted.py", []),
        ("cuda/common/tiles.cuh", ["ffn/kernels"]),
        ("recipes/debug.yaml", ["recipe"]),
        ("README.md", []),
    ],
)
def test_where_the_tests_of_a_file_are(changed, expected):
    tests = ROOT / "tests"
    always = [str(tests / "test_structure.py")]
    assert nearest_tests([changed], tests) == always + [str(tests / name) for name in expected]


def test_the_nearest_tests_come_first():
    changed = ["sparsellm/runs/lock.py", "sparsellm/data/stream.py", "tests/data/test_hub.py"]
    names = [path.rpartition("tests/")[2] for path in nearest_tests(changed, ROOT / "tests")]
    first_names = [
        "test_structure.py",
        "runs/test_lock.py",
        "data/test_stream.py",
        "data/test_hub.py",
    ]
    assert names == [*first_names, "runs", "data"]


def test_what_changed(tmp_path):
    def git(*words):
        command = ["git", "-c", "user.name=me", "-c", "user.email=me@here", *words]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    def commit(name):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)

    git("init", "-b", "main")
    for name in ("a.py", "b.py"):
        commit(name)
    assert changed_files(tmp_path) == ["b.py"]  # the last commit
    (tmp_path / "a.py").write_text("edited")
    (tmp_path / "new.py").write_text("not yet added")
    assert changed_files(tmp_path) == ["a.py", "new.py"]
    git("switch", "-c", "branch")
    git("commit", "-am", "edited")
    git("rm", "b.py")
    commit("c.py")
    assert changed_files(tmp_path) == ["a.py", "c.py", "new.py"]


def test_no_test_begins_after_the_time(tmp_path, monkeypatch):
    file = tmp_path / "test_two.py"
    file.write_text("def test_first():\n    pass\n\ndef test_second():\n    raise AssertionError\n")
    times = iter([100.0, 109.0, 111.0])  # of the beginning, and before each test
    monkeypatch.setattr("check.time", SimpleNamespace(monotonic=times.__next__))
    limit = TimeLimit(10)
    options = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    assert pytest.main([str(file), *options], plugins=[limit]) == 0
    assert limit.left_out == 1
