"""Errors that need no PyTorch come before it is imported, which takes seconds, or a minute."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import process_env

# Runs commands in one process, in which neither torch nor transformers can be imported.
_PROGRAM = """
import contextlib, io, json, sys
sys.modules |= dict.fromkeys(["torch", "transformers"])
from sparsellm.cli import main
found = []
for command in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(command)
        except SystemExit as end:
            status = end.code
        except ImportError as error:
            status = str(error)
    found.append((status, errors.getvalue()))
print(json.dumps(found))
"""

# In a folder with an occupied folder `full`, and without a GPU.
REFUSED = {
    "report": "give run folders, or one sweep: --sweep runs/quality",
    "report full --sweep full": "give run folders, or one sweep",
    "report full --out full": "full cannot be written (it is a folder); name another file: --out",
    "bench ffn": "bench ffn measures GPU kernels and needs a CUDA device",
    "bench ffn-train": "bench ffn-train measures GPU kernels and needs a CUDA device",
    "bench forward full": "bench forward measures GPU kernels and needs a CUDA device",
    "bench loader --record full": "full cannot be written (it is a folder)",
    "generate full --device cuda": "--device cuda: there is no GPU here; omit --device",
    "generate full --temperature -1": "may be negative",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit status and standard error of each command."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("")
    commands = json.dumps([command.split() for command in REFUSED])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, commands],
        capture_output=True, text=True, check=True, cwd=folder,
        env=process_env(CUDA_VISIBLE_DEVICES=""),
    )  # fmt: skip
    return dict(zip(REFUSED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("command", REFUSED)
def test_a_mistake_is_told_before_pytorch_is_loaded(command, answers):
    status, error = answers[command]
    assert status == 1, (status, error)
    assert error.startswith("error: ")
    assert REFUSED[command] in error
