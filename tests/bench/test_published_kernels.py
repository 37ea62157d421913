"""Kernels of others beside dense: what a file of calls gives, and what is refused."""

import pytest

import published_kernels
from results import read_records

from .conftest import CPU

DENSE = """
from sparsellm.bench.ffn_run import dense

def load(*weights):
    return lambda x_MK: FACTOR * dense(x_MK, *weights)

FACTOR = 1
"""
SMALL = ["--shape", "64/256", "--M", "128", "--nnz", "20", "--seconds", "0.5"]


@pytest.fixture
def theirs(tmp_path):
    """Writes a file of calls."""

    def write(text):
        path = tmp_path / "theirs.py"
        path.write_text(text)
        return str(path)

    return write


def test_both_benchmarks_are_recorded_with_dense_of_the_same_run(theirs, clock, tmp_path, capsys):
    script = theirs(DENSE + "\nload_training = load\n")
    records = tmp_path / "results.jsonl"
    published_kernels.main([script, *SMALL, "--record", str(records)], CPU)
    assert capsys.readouterr().out.count("difference") == 4
    rows = read_records(records)
    assert {(r["bench"], r["case"]["pattern"]) for r in rows} == {
        (bench, pattern)
        for bench in ("published_forward", "published_train")
        for pattern in ("uniform", "skewed")
    }
    times = [r for r in rows if r["metric"] == "ms"]
    assert {(r["value"], r["baseline"], r["ratio"]) for r in times} == {(1, 2, 2), (2, 4, 2)}
    assert all(r["sustained"]["watts"] and r["baseline_sustained"]["watts"] for r in times)
    assert all(r["case"]["nnz"] == 20 for r in rows)
    assert times[0]["command"].startswith(
        f"python benchmarks/published_kernels.py {script} --shape"
    )


def test_wrong_results_are_not_timed(theirs, clock, capsys):
    published_kernels.main([theirs(DENSE.replace("= 1", "= 2")), *SMALL], CPU)
    output = capsys.readouterr().out
    assert output.count("y differs from dense by 100.0%; wrong results are not timed") == 2
    assert "ms 1" not in output
    assert not clock  # neither configuration


def test_a_file_without_calls_is_refused(theirs):
    with pytest.raises(SystemExit, match=r"theirs.py: it defines neither load nor load_training"):
        published_kernels.main([theirs("x = 1"), *SMALL], CPU)
