"""RESULTS.md and the figures beside it: made from the records, the newest of each case."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from conftest import ROOT

import claims
import make_figures
import make_tables
import results
import sweep_results
import train_results
from make_tables import TABLES, results_page
from sparsellm.recipe.strict import load_yaml

COMMITTED = ROOT / "benchmarks"
H200 = "1× NVIDIA H200, 16 cores"


def line(bench: str, metric: str, value: float, baseline: float | None = None, **changes) -> dict:
    """A line of results.jsonl; further keywords are keys of its case, or replace others."""
    made = {"bench": bench, "metric": metric, "value": value, "unit": "ms", "baseline": baseline}
    made |= {"ratio": baseline and baseline / value, "hardware": H200, "commit": "aaa"}
    made |= {"date": "2026-01-01", "command": "sparsellm bench x", "case": {}}
    for key, changed in changes.items():
        (made if key in made else made["case"])[key] = changed
    return made


def ffn(bench: str, metric: str, value: float, baseline: float, **changes) -> dict:
    case = {"M": 16_384, "K": 2048, "N": 5632, "gated": True, "pattern": "uniform", "nnz": 30}
    case |= {"measured_nnz": 30.0, "union_64": 1628.6, "path": "sparse"}
    return line(bench, metric, value, baseline, **(case | changes))


def table_of(page: str, title: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [row for row in section.splitlines() if row.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_committed_page_is_what_the_records_give():
    page = results_page(results.read_records(COMMITTED / "results.jsonl"))
    assert (COMMITTED / "RESULTS.md").read_text(encoding="utf-8") == page
    titles = re.findall(r"^## (.*)", page, re.MULTILINE)
    assert len(titles) <= 7
    assert set(titles) <= {title for title, *_ in TABLES}
    for title in titles:
        assert {len(row) for row in table_of(page, title)} <= set(range(2, 9))
    taken = re.findall(r"^Hardware: .*NVIDIA H[12]00.*\. Commits? \w+", page, re.MULTILINE)
    assert len(taken) == len(titles)
    for shown in re.findall(r"\((figures/.*?)\)", page):
        assert (COMMITTED / shown).is_file()


def test_the_committed_figures_are_what_the_records_give():
    pinned = (ROOT / "constraints.txt").read_text()
    if f"matplotlib=={matplotlib.__version__}\n" not in pinned:
        pytest.skip(f"matplotlib {matplotlib.__version__} is not that of constraints.txt")
    drawn = make_figures.draw_all(results.read_records(COMMITTED / "results.jsonl"))
    assert drawn.keys() == {path.name for path in (COMMITTED / "figures").glob("*.svg")}
    for name, text in drawn.items():
        assert (COMMITTED / "figures" / name).read_text(encoding="utf-8") == text, name
        # README shows the frontier, where a commit says nothing to its reader.
        commits = "<" if name.startswith("frontier") else r" · commits? \w+"
        assert re.search(r">[\d×, ]*NVIDIA H[12]00[\w, ]*" + commits, text), name
        assert "prefers-color-scheme: dark" in text
        assert not re.search(r">(dense-|target-|per-layer|reinit|wide\d)", text), "a run's name"
        ET.fromstring(text.encode())


def test_every_record_names_a_commit_of_this_history():
    git = ["git", "-C", str(ROOT), "rev-list", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split()
    if len(found) < 100:
        pytest.skip("the history is not here")
    lines = results.read_records(COMMITTED / "results.jsonl")
    named = {line["commit"].removesuffix("-dirty") for line in lines}
    lost = {name for name in named if not any(commit.startswith(name) for commit in found)}
    assert lost == {"4ef5def"}, "docs/results.md says which records name other commits"


def test_the_scripts_write_page_and_figures(tmp_path, monkeypatch, capsys):
    ours = ffn("ffn_forward", "ms", 1.0, 1.7)
    (tmp_path / "results.jsonl").write_text(json.dumps(ours) + "\n")
    monkeypatch.setattr(results, "RECORDS", tmp_path / "results.jsonl")
    monkeypatch.setattr(make_figures, "FOLDER", tmp_path / "figures")
    monkeypatch.setattr(make_tables, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(claims, "PAGES", ())
    make_figures.main()
    said = capsys.readouterr().out
    assert f"{tmp_path}/figures/ffn_speed.svg\n" in said
    assert "skipped scaling.svg: " in said
    make_tables.main([])
    page = (tmp_path / "RESULTS.md").read_text()
    assert [title for title, *_ in TABLES if f"## {title}\n" in page] == ["One FFN"]
    assert table_of(page, "One FFN")[2][:4] == ["uniform", "30", "1629", "1 (1.70×)"]


def test_of_equal_cases_the_newest_counts_whatever_the_cpu():
    old = ffn("ffn_forward", "ms", 1.2, 1.7, commit="old")
    new = ffn("ffn_forward", "ms", 1.0, 1.7, commit="new", union_64=1600.0)
    new["hardware"] = "1× NVIDIA H200, 64 cores"
    elsewhere = ffn(
        "ffn_forward", "ms", 9.0, 9.0, commit="a100", hardware="1× NVIDIA A100, 8 cores"
    )
    portable = ffn("ffn_forward", "ms", 5.0, 1.7, arch="portable")
    page = results_page([old, new, elsewhere, portable])
    assert table_of(page, "One FFN")[2][:4] == ["uniform", "30", "1600", "1 (1.70×)"]
    assert "Hardware: 1× NVIDIA H200. Commit new." in page
    assert "old" not in page


def test_fp8_is_a_row_of_its_own_and_no_newer_bf16():
    both = [
        ffn("ffn_forward", "ms", value, 1.7, pattern="trace", layer="mean", **changes)
        for value, changes in ((0.8, {}), (0.5, {"precision": "fp8", "commit": "new"}))
    ]
    rows = table_of(results_page(both), "One FFN")[2:4]
    mean = "traces, mean of the layers"
    assert [(row[0], row[3]) for row in rows] == [
        (mean, "0.8 (2.12×)"),
        (f"{mean}, FP8", "0.5 (3.40×)"),
    ]


def test_a_sustained_time_shows_its_spread():
    ours = ffn("ffn_forward", "ms", 1.0, 1.7)
    ours["sustained"] = {"p10": 0.98, "p90": 1.01, "watts": 650.0, "sm_mhz": 1500.0}
    assert table_of(results_page([ours]), "One FFN")[2][3] == "1 ±1.5% (1.70×)"


def test_both_formats_are_compared_where_one_run_measured_both():
    def both(bench, metric, union, twell, baseline, **case):
        return [
            ffn(bench, metric, union, baseline, **case),
            ffn(bench, metric, twell, baseline, format="twell", **case),
        ]

    later = ffn("ffn_forward", "ms", 0.5, 1.7, commit="later")  # of the union alone
    trace = {"pattern": "trace", "layer": "mean", "nnz": 25.9}
    lines = [
        *both("ffn_forward", "ms", 1.0, 1.25, 1.7, commit="both"),
        *both("ffn_train", "ms", 2.0, 2.5, 5.0, commit="both"),
        *both("ffn_train", "memory_MiB", 100.0, 200.0, 528.0, commit="both"),
        *both("ffn_forward", "ms", 0.8, 1.0, 1.6, commit="both", **trace),
        later,
        ffn("ffn_forward", "ms", 3.0, 1.7, commit="alone", format="twell", nnz=60),
    ]
    page = results_page(lines)
    assert table_of(page, "Union against TwELL")[2:] == [
        ["traces, mean of the layers", "25.9", "0.8 (2.00×)", "1 (1.60×)", "", "", "", ""],
        [
            "uniform",
            "30",
            "1 (1.70×)",
            "1.25 (1.36×)",
            "2 (2.50×)",
            "2.5 (2.00×)",
            "100 (5.28×)",
            "200 (2.64×)",
        ],
    ]
    assert table_of(page, "One FFN")[3][3] == "0.5 (3.40×)"  # the newest union
    [(setting, pair), _] = results.format_pairs(lines, "ffn_forward").items()
    assert (setting.format, pair.union["ms"]["commit"]) == ("union", "both")
    svg = make_figures.draw_all(lines)["ffn_speed.svg"]
    assert ">TwELL (ours), uniform<" in svg
    assert "Union against TwELL" not in results_page([later])


def test_dense_and_sparse_of_one_command_are_a_pair():
    def train(kernels, value, **case):
        shape = {"recipe": "0.5b", "gpus": 1, "config": "single", "kernels": kernels}
        shape |= {"global_batch_tokens": 131_072, "micro_batch_size": 16}
        return line("train", "tokens_per_ms", value, **(shape | case))

    lines = [
        train("dense", 160.0, commit="old"),
        train("auto", 240.0, commit="old"),
        train("dense", 100.0, commit="new"),
        train("auto", 150.0, commit="new"),
        train("auto", 120.0, commit="new", format="twell"),
        line(
            "train",
            "nnz",
            33.0,
            recipe="0.5b",
            gpus=1,
            config="single",
            kernels="auto",
            global_batch_tokens=131_072,
            micro_batch_size=16,
            commit="new",
            format="twell",
        ),
        train("auto", 130.0, commit="new", token_order="auto"),
        train("auto", 999.0, commit="alone"),  # without a dense run beside it
        train("dense", 10.0, commit="apart", command="sparsellm bench train dense"),
        train("auto", 999.0, commit="apart", command="sparsellm bench train sparse"),
        train("dense", 110.0, commit="new", weight_gradients="fused"),
        train("auto", 176.0, commit="new", weight_gradients="fused"),
        line("model_forward", "tokens_per_ms", 300.0, 200.0, layers=8, M=1, ratio=1.5),
    ]
    pairs = train_results.train_pairs(lines)
    [fused] = [p for p in pairs if p.fused_gradients]
    assert fused.values("tokens_per_ms") == (110.0, 176.0)
    pairs.remove(fused)
    found = {(p.format, p.in_token_order): p.values("tokens_per_ms")[1] for p in pairs}
    assert found == {("union", False): 150.0, ("union", True): 130.0, ("twell", False): 120.0}
    assert {p.values("tokens_per_ms")[0] for p in pairs} == {100.0}
    page = results_page(lines)
    sizes = [r for r in table_of(page, "Each model size, beside the paper") if r[0] == "0.5B"]
    assert [r[2:5] for r in sizes] == [["100 → 130 (1.30×)", "", "200 → 300 (1.50×), text order"]]
    [nearest] = train_results.default_pairs(lines)
    assert (nearest.in_token_order, nearest.fused_gradients) == (True, False)
    expected = "union 100 → 150 (1.50×), union in token order 100 → 130 (1.30×), TwELL 100 → 120"
    assert "on one GPU at 33 non-zeros, dense → sparse, in one run: " + expected in page
    assert f"{expected} (1.20×) tokens/ms" in page


def test_several_gpus_say_non_zeros_and_tokens_and_compare_with_none_of_another_run():
    def train(kernels, metric, value, gpus, **changes):
        shape = {"recipe": "0.5b", "gpus": gpus, "config": "ddp8", "kernels": kernels}
        shape |= {"global_batch_tokens": 1_048_576, "micro_batch_size": 16}
        of = {"hardware": H200.replace("1×", f"{gpus}×")}
        return line("train", metric, value, **(shape | of | changes))

    lines = [
        train(kernels, metric, value, gpus)
        for kernels, rate, nnz in (("dense", 300.0, 12.0), ("auto", 450.0, 12.4))
        for gpus in (1, 4)
        for metric, value in (("tokens_per_ms", rate * gpus), ("nnz", nnz))
    ]
    rows = table_of(results_page(lines), "Over several GPUs")
    assert rows[3][:5] == [
        "0.5B",
        "4",
        "ddp8, text order",
        "16; 1,048,576; 12",
        "1200 → 1800 (1.50×)",
    ]
    svg = make_figures.draw_all(lines)["scaling.svg"]
    assert ">12 active<" in svg
    assert svg.count(">1.50×<") == 2


def test_seeds_of_a_sweep_are_one_row_of_their_newest_commit():
    def run(name, seed, metric, value, step=10, **case):
        shape = {"layers": 2, "hidden_size": 8, "intermediate_size": 100, "l1_coefficient": 0.0}
        shape |= {"run": f"{name}-seed{seed}", "step": step, "tokens": step, "activation": "relu"}
        return line("sweep_x", metric, value, **(shape | case))

    sparse = {"l1_coefficient": 0.1, "activation": "relu"}
    lines = [
        run("dense", 0, "validation_loss", 9.0, commit="old"),
        *(run("dense", seed, "nnz", 40.0) for seed in (0, 1)),
        *(run("dense", seed, "validation_loss", 4.0 + seed) for seed in (0, 1)),
        run("l1-0.1", 0, "nnz", 60.0, step=5, **sparse),
        run("l1-0.1", 0, "nnz", 2.0, **sparse),
        run("l1-0.1", 0, "throughput", 1000.0, **sparse),
        run("l1-0.1", 0, "score_mean", 0.31, **sparse),
        run("l1-0.1", 0, "score_mean", 0.99, limit=5, **sparse),
        run("l1-0.1", 0, "validation_loss", 4.95, **sparse),
    ]
    rows = table_of(results_page(lines), "Quality against non-zeros")
    assert rows[2][:7] == ["x: dense", "2", "40.0 (60.0% zeros)", "", "4.000, 5.000", "+0.0%", ""]
    assert rows[3] == ["x: l1-0.1", "1", "2.0 (98.0% zeros)", "", "4.950", "+10.0%", "31.0%", "1k"]
    svg = make_figures.draw_all(lines)["quality_and_speed.svg"]
    assert ">L1, λ at each point<" in svg
    assert ">1e-1<" in svg
    shape = {"layers": 2, "K": 8, "run": "l1-0.1-seed0", "token_order": "auto"}
    by = {"command": "sparsellm bench forward runs/x/l1-0.1-seed0 --layers"}
    other = {"command": "sparsellm bench forward runs/y/l1-0.1-seed0 --layers"}
    lines += [
        line("model_forward", "tokens_per_ms", 9.0, ratio=9.0, measured_nnz=9, **shape, **other),
        line("model_forward", "tokens_per_ms", 3.0, ratio=3.0, measured_nnz=2, commit="old",
             **shape, **by),
        line("model_forward", "tokens_per_ms", 1.5, ratio=1.5, measured_nnz=2, **shape, **by),
        *(line("layer_forward", "ms", 1.0, 2.0 + i, measured_nnz=i + 1, layer=i, **shape, **by)
          for i in range(2)),
    ]  # fmt: skip
    [group] = [g for g in sweep_results.sweep_groups(lines) if g.name == "l1-0.1"]
    assert [r["ratio"] for r in sweep_results.forwards(lines, group, "tokens_per_ms")] == [1.5]
    assert [r["ratio"] for r in sweep_results.forwards(lines, group, "ms")] == [2.0, 3.0]
    svg = make_figures.draw_all(lines)["score_and_forward.svg"]
    assert ">Mean task score (sweep x)<" in svg
    assert ">L1, λ at each point<" in svg


def test_hardware_is_what_was_used_not_what_the_machine_has():
    line = {"case": {"gpus": 1}, "hardware": "2× NVIDIA H200, 32 cores", "commit": "abc"}
    lines = [line | {"date": "2026-11-21"}, line | {"case": {}, "date": "2026-11-22"}]
    assert results.taken_on(lines[:1]) == "1× NVIDIA H200 · commit abc"
    assert results.taken_on(lines) == "1×, 2× NVIDIA H200 · commit abc"


def test_numbers_in_prose_are_those_of_the_newest_records():
    lines = results.read_records(COMMITTED / "results.jsonl")
    for page in claims.PAGES:
        text = page.read_text(encoding="utf-8")
        assert claims.fill(text, lines) == text, f"{page}: run `make results`"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (COMMITTED / "figures" / "frontier-same-time.svg").is_file()
    assert "figures/frontier-same-time.svg" in readme


def test_every_name_of_a_record_is_in_some_page():
    pages = " ".join(page.read_text(encoding="utf-8") for page in claims.PAGES)
    assert load_yaml(claims.SOURCES).keys() <= claims.names_in(pages)


@pytest.mark.parametrize("page", claims.PAGES, ids=lambda page: page.name)
def test_no_measured_number_stands_without_its_record(page):
    assert claims.unclaimed(page.read_text(encoding="utf-8")) == []


def test_a_claim_takes_the_newest_record_and_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "SOURCES", tmp_path / "claims.yaml")
    (tmp_path / "claims.yaml").write_text(
        "new: b run=x-* loss\nother: b run=y loss\nall: b loss\nshort: b burst loss\n"
        "long: b sustained loss\n"
    )

    def of(value, **changes):
        return line("b", "loss", value, **changes)

    old, early, last = (
        of(value, commit=commit, run="x-1", step=step)
        for value, commit, step in ((9.0, "aaa", 9), (4.0, "bbb", 1), (3.25, "bbb", 2))
    )
    lines = [old, early, last, of(4.0, run="y", commit="bbb")]
    text = "at 7.1<!--= new -->, 1<!--= 100 * (1 - new / other) -->% lower"
    now = "at 3.2<!--= new -->, 19<!--= 100 * (1 - new / other) -->% lower"
    assert claims.fill(text, lines) == now
    with pytest.raises(ValueError, match="the sentence says the opposite"):
        claims.fill("2<!--= new - other -->", lines)
    part = "7.0<!--= interpolate(3.5, (new, 10), (other, 40)) -->"
    assert claims.fill(part, lines).startswith("20.0<")
    with pytest.raises(ValueError, match=r"4.5 is not between 3.25 and 4: name other records"):
        claims.fill(part.replace("3.5", "4.5"), lines)
    with pytest.raises(ValueError, match="several cases"):
        claims.fill("2<!--= all -->", [*lines[1:2], of(1.0, run="z", step=1, commit="bbb")])
    under = {"p10": 1.0, "p90": 1.0}
    for text, kind, other in (("2<!--= short -->", None, under), ("2<!--= long -->", under, None)):
        assert claims.fill(text, [of(2.0) | {"sustained": kind}]) == text
        with pytest.raises(ValueError, match="the text says otherwise"):
            claims.fill(text, [of(2.0) | {"sustained": other}])
    text = "2.5% and 3×, `4.5`, 5.5<!--set-->, [6](7.5), 0.5b, 8.5<!--= new -->"
    assert len(claims.unclaimed(text)) == 2
