"""Processes of training runs: what a failed one says, and that a closed one is gone."""

import sys
from contextlib import closing

import psutil
import pytest

from sparsellm.processes import launched
from sparsellm.runs.lock import lives


def test_a_failed_launch_is_told_by_the_line_that_names_it(tmp_path):
    says = "print('warming up\\nerror: data.files: none\\nChildFailedError: see below'); exit(3)"
    with pytest.raises(ValueError, match=r"failed: error: data\.files: none \(all .*run\.log\)"):
        list(launched.watch([sys.executable, "-c", says], tmp_path / "run"))
    with pytest.raises(ValueError, match="failed: it said nothing"):
        list(launched.watch([sys.executable, "-c", "exit(1)"], tmp_path / "run"))


def test_closing_kills_all_that_was_started(tmp_path):
    # As torchrun does, the launcher gives its child a session of its own.
    child = "import time; time.sleep(100)"
    launcher = (
        "import subprocess, sys, time, pathlib, json\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "run = pathlib.Path(sys.argv[1]); run.mkdir()\n"
        "lists = ['nnz_mean', 'nnz_max', 'nnz_p50', 'nnz_p99', 'dead_fraction']\n"
        "stats = dict.fromkeys([*lists, 'nnz_by_position', 'nnz_histogram'], [])\n"
        "line = {'kind': 'train', 'step': 1, 'tokens': 1, 'loss': 1.0, 'sparsity': stats}\n"
        "line = json.dumps(line | {'child': child.pid})\n"
        "(run / 'metrics.jsonl').write_text(line + '\\n')\n"
        "time.sleep(100)\n"
    )
    run_path = tmp_path / "run"
    watched = launched.watch([sys.executable, "-c", launcher, str(run_path)], run_path)
    with closing(watched):
        records = next(r for r in watched if r)
        process = psutil.Process(records[0]["child"])
        assert lives(process)
    assert not lives(process)
