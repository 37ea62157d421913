"""A writer that is killed, at whatever operation, leaves a whole checkpoint to resume from."""

from pathlib import Path

import pytest
from conftest import ROOT, python

WORKER = Path(__file__).with_name("killed_writer.py")


@pytest.mark.long
def test_killed_at_every_operation_of_two_saves(tmp_path):
    result = python(WORKER, tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    # Of each save at least its folder, its eight files, two renames and the one that it replaces.
    assert int(result.stdout) > 2 * 12
