"""Tables, figures and claims: made from the committed records, the newest of each case."""

import re
import subprocess
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from conftest import ROOT

import claims
import figures
import make_results
import results


@pytest.fixture(scope="module")
def records():
    return results.read_records(results.RECORDS)


@pytest.mark.parametrize("page", make_results.PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_records_give(page, records):
    text = page.read_text(encoding="utf-8")
    assert make_results.fill(text, records) == text, f"{page}: run `make results`"
    for mark in ("<!--=", "<!--set-->", "<!--given-->"):
        assert mark not in text


def test_every_table_is_in_a_page_and_its_rows_have_as_many_cells_as_its_head():
    pages = "".join(page.read_text(encoding="utf-8") for page in make_results.PAGES)
    blocks = re.findall(r"<!-- begin (\S+) -->\n(.*?)<!-- end \1 -->", pages, re.DOTALL)
    assert sorted(name for name, _ in blocks) == sorted(make_results.TABLES)
    for name, table in blocks:
        assert len({row.count("|") for row in table.strip().splitlines()}) == 1, name


def test_figures_are_what_the_records_give(records):
    pinned = (ROOT / "constraints.txt").read_text()
    if f"matplotlib=={matplotlib.__version__}\n" not in pinned:
        pytest.skip(f"matplotlib {matplotlib.__version__} is not that of constraints.txt")
    drawn = figures.draw_all(records)
    for name, text in drawn.items():
        assert (figures.FOLDER / name).read_text(encoding="utf-8") == text, name
        assert "prefers-color-scheme: dark" in text
        ET.fromstring(text.encode())


def test_measured_numbers_in_prose_are_those_of_the_records(records):
    assert claims.wrong(records) == []
    rows = claims.read_claims()
    assert len(rows) <= 25
    assert all(row["sentence"].count("{") == 1 for row in rows)


def test_a_claim_that_does_not_hold_is_named(records, tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "CLAIMS", tmp_path / "claims.csv")
    run = "'frontier-0.5b-long', 'dense-silu-0.002-seed0'"
    (tmp_path / "claims.csv").write_text(
        f'page,sentence,expression\ndocs/results.md,Dense SiLU ends at {{:.3f}}!,"loss({run})"\n'
    )
    assert claims.wrong(records) == ["docs/results.md does not say: Dense SiLU ends at 3.604!"]


def test_every_record_names_a_commit_of_this_history(records):
    git = ["git", "-C", str(ROOT), "rev-list", "HEAD"]
    listed = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split()
    if len(listed) < 100:
        pytest.skip("the history is not here")
    named = {line["commit"].removesuffix("-dirty") for line in records}
    assert not {name for name in named if not any(commit.startswith(name) for commit in listed)}


def test_the_records_stay_small():
    assert results.RECORDS.stat().st_size <= 3_000_000, "earlier records are in the history"


def line(value, *, commit="aaa", metric="loss", hardware="1× NVIDIA H200, 9 cores", **case):
    record = {"bench": "sweep_x", "metric": metric, "value": value, "commit": commit}
    return record | {"hardware": hardware, "case": case}


def test_the_newest_record_of_a_case_counts():
    lines = [
        line(9.0, commit="old", K=1),
        line(8.0, hardware="1× NVIDIA H100, 9 cores", K=1),
        line(7.0, K=1, precision="fp8"),
        line(3.0, K=1, union_64=5.0),
    ]
    assert results.find(lines, "sweep_x", "loss", K=1)["value"] == 3.0
    assert results.find(lines, "sweep_x", "loss", gpu="H100", K=1)["value"] == 8.0
    assert results.find(lines, "sweep_x", "loss", precision="fp8")["value"] == 7.0
    with pytest.raises(ValueError, match="there is no such record"):
        results.find(lines, "sweep_x", "loss", K=2)
    with pytest.raises(ValueError, match="several cases, name more keys"):
        results.find([*lines, line(2.0, K=2)], "sweep_x", "loss")


def test_a_run_is_that_of_its_newest_commit():
    def validation(step, loss, **changes):
        case = {"run": "a-seed0", "step": step}
        return [
            line(loss, metric="validation_loss", **case, **changes),
            line(10.0 * step, metric="gpu_seconds", **case, **changes),
        ]

    lines = [*validation(9, 1.0, commit="old"), *validation(2, 4.0), *validation(1, 6.0)]
    [run] = results.runs(lines, "x", "a-seed*")
    assert (run.case["step"], run.last("validation_loss")) == (2, 4.0)
    with pytest.raises(ValueError, match="no run b on H200 is recorded"):
        results.runs(lines, "x", "b")
