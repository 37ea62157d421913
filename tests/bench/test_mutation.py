"""Mutation testing tells what a test notices from what none does."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT, process_env

sys.path.insert(0, str(ROOT / "benchmarks"))

mutants = pytest.importorskip("mutants", reason="needs mutmut: pip install -e '.[dev]'").mutants

MODULE = '''
SIDES = 4
Rows = dict[str, int]

@decorated
def area(width: int, height: int = 2) -> int:
    """Not changed."""
    if width < 0:
        raise ValueError("neither is this" + 1)
    return width * height
'''


def test_a_mutant_changes_what_runs():
    found = {str(mutant): mutant for mutant in mutants(MODULE)}
    assert set(found) == {
        "SIDES = 4 → SIDES = None",
        "4 → 5",
        "2 → 3",
        "< 0 → <= 0",
        "0 → 1",
        "width * height → width / height",
    }
    changed = found["width * height → width / height"]
    assert changed.source() == MODULE.replace("*", "/")
    assert list(changed.lines) == [10]
    in_functions = {text for text, mutant in found.items() if mutant.in_function}
    assert in_functions == {"< 0 → <= 0", "0 → 1", "width * height → width / height"}


def test_arguments_that_no_test_can_tell_are_left_alone():
    changes = [str(mutant) for mutant in mutants("f(x, device=d)\n")]
    assert changes == ["f(x, device=d) → f(None, device=d)", "f(x, device=d) → f(device=d)"]


ON_A_GPU = """
if device.type == "cuda" and wanted:
    rows = 1
    torch.save(rows)
elif x.is_cuda:
    rows = 2
else:
    rows = 3
name = torch.cuda.get_device_name(4) if torch.cuda.is_available() else 5
torch.cuda.synchronize(6)
if not x.is_cuda:
    rows = 7
"""


def test_what_only_a_gpu_runs_is_left_alone():
    texts = " ".join(str(mutant) for mutant in mutants(ON_A_GPU))
    assert {number for number in range(1, 8) if f"{number} → {number + 1}" in texts} == {3, 5, 7}
    assert '== "cuda" → != "cuda"' in texts


PROGRAM = """
import sys
from pathlib import Path
import mutation
mutation.PRELOADED = ()
mutation.GROUPS = {"areas": mutation.Group(["sparsellm/area.py"], ["test_*.py"])}
sys.argv[1:] = ["--folder", "../results", "--jobs", "2", *sys.argv[1:]]
mutation.main()
"""


SLOW = """
import subprocess, sys
import pytest

@pytest.mark.slow
def test_in_a_process():
    program = "from sparsellm.area import area; assert area(2, 3) == 6"
    subprocess.run([sys.executable, "-c", program], check=True)
"""


AREA = """def area(width, height):
    while width < 0:
        width += 2
    return width * height
"""


@pytest.mark.long
@pytest.mark.slow
def test_survivors_are_told_and_tried_again(tmp_path):
    root = tmp_path / "project"
    (root / "sparsellm").mkdir(parents=True)
    (root / "sparsellm" / "__init__.py").touch()
    (root / "sparsellm" / "area.py").write_text(AREA)
    test = root / "test_area.py"
    test.write_text(
        "from sparsellm.area import area\n\ndef test_area():\n    assert area(2, 1) == 2\n"
    )

    def run(*arguments, status=0):
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=root,
            env=process_env(PYTHONPATH=str(ROOT / "benchmarks")),
        )
        assert result.returncode == status, result.stderr
        return result.stdout + result.stderr

    first = run()
    assert "sparsellm/area.py:4: width * height → width / height   (1 tests)" in first
    survivors = first.count("(1 tests)")
    results = tmp_path / "results" / "results.jsonl"
    tried = len(results.read_text().splitlines())
    (root / "test_process.py").write_text(SLOW)
    again = run("--retry")
    assert "width / height" not in again
    # Each is unnoticed by the quick test, as before, and then seen by the slow one.
    assert len(results.read_text().splitlines()) == tried + 2 * survivors

    (root / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    refused = run("--record", "../record.jsonl", status=1)
    assert "fails without a mutant: test_wrong.py::test_wrong" in refused
    assert "not recorded: 1 tests fail" in refused
    assert not (tmp_path / "record.jsonl").exists()
