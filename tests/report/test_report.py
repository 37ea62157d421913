"""The report: what is read of a run, and the page in a real browser."""

import itertools
import json
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, TINY, set_arguments
from runs.written_runs import record, write_run

from report.browser import CHROMIUM, Browser
from sparsellm.cli import main
from sparsellm.recipe import load_recipe
from sparsellm.recipe.estimate import active_parameters
from sparsellm.report import drawing
from sparsellm.report.collect import Activity, Sample, read_runs
from sparsellm.report.page import _sample, json_for_script, render_page, write_report
from sparsellm.report.series import chart_specs, run_series, thin
from sparsellm.report.tables import difference_table, evaluation_table, summary_table
from sparsellm.runs import saver
from sparsellm.runs.checkpoint import Snapshot
from sparsellm.runs.telemetry.evaluations import Score, read_evaluations
from sparsellm.runs.telemetry.metrics import LAYER_METRICS, METRICS, mean

CHARTS = [
    # Without a GPU and a target.
    *(m.name for m in METRICS if m.section and m.name not in ("mfu", "target_error")),
    *(f"{m.name}-layers" for m in LAYER_METRICS if m.section and not m.if_different),
    *("position", "distribution", "tail", "popularity"),
]


# --- what is read ---------------------------------------------------------------------------------


def test_what_is_not_a_complete_run_gives_one_line(tiny, tmp_path, error_of):
    why = "it has no metrics.jsonl; give a folder such as runs/debug"
    assert error_of("report", tmp_path) == f"error: {tmp_path} is not a run: {why}"
    path = write_run(tiny(), [record(tiny(), 1)])
    metrics = path / "metrics.jsonl"
    assert (
        error_of("report", metrics)
        == f"error: {metrics} is a file; give the run's folder, such as {path}"
    )
    metrics.write_bytes(b'{"step": "\x01"}\n' + metrics.read_bytes())
    damaged = f"error: {metrics}, line 1 is damaged: not JSON (Invalid control character at); "
    assert (
        error_of("report", path) == f"{damaged}restore the file from a copy, or correct that line"
    )
    write_run(tiny(), [record(tiny(), 1)])
    (path / "recipe.yaml").unlink()
    assert "recipe.yaml is missing; copy it from one of the checkpoints" in error_of("report", path)


def test_errors_name_file_and_remedy(tiny, tmp_path):
    recipe = tiny()
    path = write_run(recipe, [])
    with pytest.raises(ValueError, match=r"nothing was logged yet"):
        read_runs([path])
    write_run(recipe, [record(recipe, 1)])
    (path / "recipe.yaml").write_text(tiny("model.num_hidden_layers=3").to_yaml())
    with pytest.raises(ValueError, match=r"nnz_mean of step 1 has 2 values .* model has 3"):
        read_runs([path])
    write_run(recipe, [record(recipe, 1)])
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written .*--out"):
        write_report([path], tmp_path / "file" / "report.html")
    (path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"cannot be written \(it is a folder\)"):
        write_report([path], tmp_path)  # said before the run is read


def test_files_lie_where_they_are_looked_for(tiny, tmp_path, monkeypatch, cli_here):
    monkeypatch.chdir(tmp_path)
    paths = [write_run(tiny(f"name={name}"), [record(tiny(), 1)]) for name in "ab"]
    assert cli_here("report", paths[0]).stdout.split() == [str(paths[0] / "report.html")]
    assert cli_here("report", *paths).stdout.split() == ["report.html"]
    assert "2 runs in one set of charts" in (tmp_path / "report.html").read_text()


def test_labels_are_folders_and_grow_where_they_clash(tiny, tmp_path):
    paths = [
        write_run(tiny(f"logging.run_dir={tmp_path / parent}", "name=same"), [record(tiny(), 1)])
        for parent in ("a", "b")
    ]
    paths.append(write_run(tiny("name=other"), [record(tiny(), 1)]))
    runs = read_runs([*paths, paths[0] / ".." / "same"])  # named twice, shown once
    assert [run.label for run in runs] == ["a/same", "b/same", "other"]


def test_a_resumed_run_adds_up_its_processes(tiny):
    recipe = tiny()
    first = {"kind": "session", "step": 0, "id": "a", "startup_seconds": 2.0}
    killed = {"kind": "session_end", "step": 2, "session": "a", "seconds": 9.0, "how": "killed"}
    changes = ["train.steps 3 → 4"]
    second = {"kind": "session", "step": 2, "id": "b", "startup_seconds": 1.0, "changes": changes}
    one, two, three, four = (record(recipe, s, seconds=1.5 * s) for s in (1, 2, 3, 4))
    [run] = read_runs([write_run(recipe, [first, one, two, killed, second, three, four])])
    assert (run.resumed_at, run.seconds) == ([3], 16.0)
    table = summary_table([run])
    assert "before step 3<" in table
    assert "<td>after step 2: train.steps 3 → 4</td>" in table
    third = {"kind": "session", "step": 2, "id": "c"}  # went on from the same checkpoint again
    [run] = read_runs([write_run(recipe, [first, one, two, killed, second, three, third, four])])
    assert "train.steps 3 → 4" not in summary_table([run])
    active = active_parameters(recipe, mean(run.train[-1]["sparsity"]["nnz_mean"]))
    assert f"{active:,}" in table


def test_a_run_that_began_with_other_weights_says_so(tiny):
    origin = {"name": "dense", "step": 4, "tokens": 1024}
    sessions = [
        {"kind": "session", "step": 0, "id": "a"} | more for more in ({}, {"init_from": origin})
    ]
    paths = [
        write_run(tiny(f"name={name}"), [session, record(tiny(), 1)])
        for name, session in zip("ab", sessions, strict=True)
    ]
    row = "<td>random</td><td>dense after 1,024 tokens, not counted above</td>"
    assert row in summary_table(read_runs(paths))


# --- what is drawn --------------------------------------------------------------------------------


def test_thinning_keeps_ends_and_spikes():
    points = [(i, 1.0) for i in range(10_000)]
    points[5_003] = (5_003, 9.0)
    points[7_777] = (7_777, -9.0)
    thinned = thin(points, 100)
    assert len(thinned) <= 100
    assert thinned == sorted(thinned)
    assert {points[0], points[-1], points[5_003], points[7_777]} <= set(thinned)
    assert thin(points[:100], 100) == points[:100]


def test_series_are_the_records_numbers(tiny):
    recipe = tiny()
    held_out = {"kind": "validation", "step": 2, "tokens": 512, "loss": 2.5, "num_targets": 8}
    [run] = read_runs([write_run(recipe, [record(recipe, 1), record(recipe, 2), held_out])])
    series = run_series(run)
    assert series["lines"]["loss"] == {"x": [256, 512], "y": [5.0, 2.5]}
    assert series["lines"]["validation"] == {"x": [512], "y": [2.5]}
    assert series["lines"]["nnz"]["y"] == [10.5, 5.5]
    assert series["lines"]["union_mean"]["y"] == [20.5, 20.5]
    assert series["lines"]["mfu"] == {"x": [], "y": []}
    assert series["heat"]["nnz_mean"] == [[10.0, 11.0], [5.0, 6.0]]
    # Buckets 0 and 1 hold one count each: 3 of 4 tokens have none, 1 of 4 has one.
    assert series["lines"]["distribution"]["y"][:3] == [0.75, 0.25, 0.0]
    assert series["lines"]["tail"]["y"][:3] == [1.0, 0.25, 0.0]
    assert series["lines"]["position"]["x"] == [1, 2, 3, 5, 9, 17]
    assert series["lines"]["popularity"] == {"x": [], "layers": []}


def test_the_summary_has_the_coefficient_that_a_target_led_to(tiny):
    recipe = tiny("sparsity.target_nnz=5", "sparsity.l1_coefficient=1e-4")
    [run] = read_runs([write_run(recipe, [record(recipe, 1)])])
    text = "0.02 at step 1, moved from 0.0001 towards 5 non-zeros per token"
    assert f"<td>{text}</td>" in summary_table([run])


def _snapshot(stats, trainer):
    return Snapshot(trainer["step"], {}, trainer, recipe_yaml="", stats=stats)


def test_popularity_is_the_share_of_the_most_active(tiny):
    recipe = tiny("model.num_hidden_layers=2")
    path = write_run(recipe, [record(recipe, 2)])
    active = torch.zeros(2, 64, dtype=torch.int64)
    active[0, 10], active[0, 3], active[0, 5] = 6, 3, 1  # layer 1 is silent
    tensors = {
        "activity_LN": torch.zeros_like(active),
        "activity_tokens": torch.tensor(0),  # no window is complete: the open one is shown
        "window_fired_LN": active,
        "window_seen_tokens": torch.tensor(512),
    }
    folder = saver.save(path / "checkpoints", _snapshot(tensors, {"step": 2}), keep=1)
    [run] = read_runs([path])
    assert isinstance(run.activity, Activity)
    curve = run_series(run)["lines"]["popularity"]
    assert (curve["tokens"], curve["step"]) == (512, 2)
    assert curve["x"][:3] == [round(k / 64, 6) for k in (1, 2, 3)]
    assert curve["x"][-1] == 1.0
    assert curve["layers"][0][:4] == [0.6, 0.9, 1.0, 1.0]
    assert set(curve["layers"][1]) == {0.0}
    (folder / "stats.safetensors").write_bytes(b"half")
    with pytest.raises(
        ValueError, match=r"stats.safetensors is truncated .*move this one elsewhere"
    ):
        read_runs([path])


def test_differences_are_the_keys_that_differ(tiny):
    recipes = [tiny("name=a"), tiny("name=b", "sparsity.l1_coefficient=0", "seed=7")]
    runs = read_runs([write_run(recipe, [record(recipe, 1)]) for recipe in recipes])
    keys = re.findall(r"<tr><th scope='row'>(.*?)</th>", difference_table(runs))
    assert keys == ["seed", "sparsity.l1_coefficient"]
    assert "One run" in difference_table(runs[:1])
    rates = ("a", 0.001), ("b", 0.0010000001)
    recipes = [tiny(f"name={name}", f"optimizer.learning_rate={rate}") for name, rate in rates]
    table = difference_table(read_runs([write_run(r, [record(r, 1)]) for r in recipes]))
    assert "<td>0.001</td><td>0.0010000001</td>" in table


# --- evaluations ----------------------------------------------------------------------------------


SHORT = {"num_rows": 5, "num_rows_total": 90}  # the first rows alone


def test_evaluations_of_every_kind(tiny):
    recipe = tiny()
    task = {"acc": 0.5, "acc_stderr": 0.1, "acc_norm": None, "acc_norm_stderr": None}
    logged = {"kind": "evaluation", "step": 1, "tokens": 256, "mean": 0.4, "mean_stderr": None}
    path = write_run(recipe, [record(recipe, 1), logged | {"tasks": {"boolq": task}}])
    assert [e.step for e in read_evaluations(path, [])] == []

    def save(name, content):
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))

    suite = {"tasks": {"boolq": {"metric": "acc", "in_mean": True}}}
    whole = {"step": 2, "tokens": 512, "limit": None, "mean": 0.5, "mean_stderr": 0.01}
    save("checkpoints/eval_step_00000002.json", whole | {"tasks": {"boolq": task}, "suite": suite})
    several_tasks = {name: task | SHORT for name in ("boolq", "piqa", "sciq")}
    # Loses: cut short.
    save("checkpoints/eval_tried.json", whole | {"limit": 5, "tasks": several_tasks})
    unnamed = {"tasks": {"wiki": {"word_perplexity": 12.5, "acc": 0.25, "version": "2.0"}}}
    save("checkpoints/step_00000003/eval.json", unnamed)

    [run] = read_runs([path])
    assert [(e.step, e.tokens) for e in run.evaluations] == [(1, 256), (2, 512), (3, None)]
    assert run.evaluations[1].scores == {("boolq", "acc"): Score(0.5, 0.1, in_mean=True)}
    assert run.evaluations[1].mean == Score(0.5, 0.01)
    assert Score(75.25, 0.5).text("f1") == "75.2500 ± 0.5000"  # as squadv2 gives it
    assert run_series(run)["lines"]["evaluation"] == {"x": [256, 512], "y": [0.4, 0.5]}
    text = re.sub(r"<[^>]*>", " ", evaluation_table([run]))
    assert "step 3" in text
    assert "12.5000" in text
    assert "25.00" in text
    save("eval.json", {})
    (path / "eval.json").write_text("{")
    with pytest.raises(ValueError, match=r"eval.json is damaged: .*evaluate again"):
        read_runs([path])


def test_what_was_cut_short_is_marked(tiny):
    recipe = tiny()
    logged = {"kind": "evaluation", "step": 1, "tokens": 256, "mean": 0.4, "mean_stderr": None}
    tasks = {"piqa": {"acc": 0.5} | SHORT, "tiny": {"acc": 0.5, "num_rows": 3, "num_rows_total": 3}}
    path = write_run(recipe, [record(recipe, 1), logged | {"tasks": tasks}])
    [run] = read_runs([path])
    assert [evaluation.limit for evaluation in run.evaluations] == [5]
    caveat = "debug: only the first 5 rows of each task, not a result to report"
    assert caveat in evaluation_table([run])
    lines = run_series(run)["lines"]
    assert lines["evaluation"] == {"x": [], "y": []}
    assert lines["evaluation_limited"] == {"x": [256], "y": [0.4]}

    (path / "checkpoints").mkdir()
    for name, rows in (("_limit20", 20), ("_limit7", 7), ("", 90)):
        if not name:  # of the two, that of more rows counts, though it is read first
            assert [e.limit for e in read_evaluations(path, [])] == [20]
        scored = {"tasks": {"piqa": {"acc": 0.3, "num_rows": rows, "num_rows_total": 90}}}
        (path / "checkpoints" / f"eval_step_00000002{name}.json").write_text(json.dumps(scored))
    assert [e.limit for e in read_evaluations(path, [])] == [None]


@pytest.mark.parametrize(
    "files",
    [
        (("", 0.5, ["piqa"]), ("_mmlu", None, ["law", "logic", "virology"])),
        (("_bf16", 0.3, ["piqa"]), ("", 0.5, ["piqa"]), ("_sparse", 0.4, ["piqa"])),
    ],
)
def test_the_suites_mean_by_the_usual_kernels_comes_before_other_scores(tiny, files):
    recipe = tiny()
    path = write_run(recipe, [record(recipe, 1)])
    (path / "checkpoints").mkdir()
    for name, value, tasks in files:
        scored = {"step": 1, "mean": value, "tasks": {task: {"acc": 0.3} for task in tasks}}
        (path / "checkpoints" / f"eval_step_00000001{name}.json").write_text(json.dumps(scored))
    [evaluation] = read_evaluations(path, [])
    assert evaluation.mean == Score(0.5, None)


def test_without_evaluations_the_report_says_so(tiny):
    recipe = tiny()
    [run] = read_runs([write_run(recipe, [record(recipe, 1)])])
    assert "No evaluation" in evaluation_table([run])


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sample_of_text")
def test_a_training_ends_with_text_that_the_report_shows(train):
    done = train()
    [run] = read_runs([done.path])
    assert f"what the model writes by itself:\n{run.sample}\n" in done.stdout
    assert run.sample.step == 4
    page = render_page([replace(run, sample=Sample(step=4, text="<b>def</b>"))])
    assert "after step 4:</p><pre class='text'>&lt;b&gt;def&lt;/b&gt;</pre>" in page

    again = train().stdout
    assert "nothing to do" in again
    assert "what the model writes" not in again
    assert "what the model writes" in train("train.steps=6").stdout
    assert read_runs([done.path])[0].sample.step == 6


def test_bytes_that_are_no_text_are_not_shown_as_text():
    assert str(Sample(step=1, text="def f():\n\treturn 'λ'")) == "def f():\n\treturn 'λ'"
    sample = Sample(step=1, text="a" * 19 + "\x1b")  # it would change a terminal's colours
    assert str(sample) == sample.text == "a" * 19 + "\ufffd"
    random = Sample(step=1, text=bytes(range(64)).decode("utf-8", "replace") + "\ufffd" * 64)
    assert str(random) == (
        "(no readable text yet: 94 of its first 128 characters are control characters or "
        "invalid UTF-8)"
    )
    assert f"<pre class='text'>{random}</pre>" in _sample(random)


def test_text_of_a_run_cannot_become_markup(tiny):
    evil = "</script><script>alert(1)</script><!-- & {{DATA}}"
    recipe = tiny()
    path = write_run(recipe, [record(recipe, 1)])
    content = yaml.safe_load(recipe.to_yaml()) | {"description": evil}
    (path / "recipe.yaml").write_text(yaml.safe_dump(content))
    page = render_page(read_runs([path]))
    assert evil not in page
    assert unescape(page).count(evil) == 2  # the heading's line and the recipe
    assert page.count("<script") == page.count("</script>") == 2

    text = json_for_script({"label": evil})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"label": evil}


def test_package_carries_what_the_page_is_made_of():
    folder = ROOT / "sparsellm" / "report" / "assets"
    page = (folder / "page.html").read_text()
    assert {p.suffix for p in folder.iterdir()} >= {".html", ".css", ".js"}
    for text in (page, *(file.read_text() for file in folder.glob("*.js"))):
        links = set(re.findall(r"https?://[^\"' ]+", text))
        assert links <= {"http://www.w3.org/2000/svg"}  # a name, never fetched


# Linear RGB as seen without long, middle or short cones (Machado, Oliveira and Fernandes 2009).
VISION = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no long": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no middle": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no short": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def lab(color, vision):
    """CIELAB (D65) of ``rrggbb`` as a reader with that vision sees it."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear_rgb = np.clip(np.array(vision) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear_rgb / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION.values(), ids=VISION)
def test_colours_stay_apart_for_every_reader(vision):
    css = (ROOT / "sparsellm" / "report" / "assets" / "style.css").read_text()
    colors = re.findall(r"--run-\d: #(\w{6})", css)
    assert len(colors) == 16
    for theme in (colors[:8], colors[8:]):
        for one, other in itertools.combinations(theme, 2):
            assert np.linalg.norm(lab(one, vision) - lab(other, vision)) >= 25, (one, other)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("the page was NOT looked at: no chromium or google-chrome on the PATH")
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory, browser):
    """The report of two real runs: a resumed one, and one of a single record without L1."""
    folder = tmp_path_factory.mktemp("report")
    places = [*TINY, f"logging.run_dir={folder / 'runs'}"]
    resumed = ["train", "--recipe", "debug", *set_arguments([*places, "name=resumed"])]
    assert main([*resumed, "--set", "train.steps=2"]) == 0
    assert main(resumed) == 0
    short = [*places, "name=single", "train.steps=1", "sparsity.l1_coefficient=0"]
    assert main(["train", "--recipe", "debug", *set_arguments(short)]) == 0
    runs = [load_recipe("debug", [*places, f"name={name}"]).run_path for name in NAMES]
    assert main(["report", *map(str, runs), "--out", str(folder / "report.html")]) == 0
    return folder / "report.html"


NAMES = ("resumed", "single")


def opened(browser, page, **options):
    browser.open(page, **options)
    assert browser.problems() == []
    assert browser.requests() == [page.resolve().as_uri()]
    return browser


@pytest.mark.slow
def test_page_draws_every_chart_and_asks_for_nothing(browser, page):
    opened(browser, page)
    charts = browser.evaluate("[...document.querySelectorAll('figure.chart')].map(e => e.id)")
    changed = [name for name in CHARTS if f"chart-{name}" in charts]
    assert sorted(charts) == sorted(f"chart-{name}" for name in changed)
    note = browser.evaluate("document.querySelector('#training + .note').innerText")
    metrics = {metric.name: metric.title for metric in METRICS}
    assert all(metrics[name] in note for name in set(CHARTS) - set(changed))
    assert "Steps skipped so far (0)" in note
    for name in changed:
        labels = browser.evaluate(
            f"[...document.querySelectorAll('#chart-{name} svg[role=img]')]"
            ".map(e => e.getAttribute('aria-label'))"
        )
        assert labels, name
        assert all(len(label) > 20 for label in labels)
    drawn = "document.querySelectorAll('#chart-{} .series[d]').length"
    assert browser.evaluate(drawn.format("loss")) == 4  # two runs, training and validation
    assert browser.evaluate(drawn.format("position")) == 2
    assert browser.evaluate("document.querySelectorAll('#chart-nnz_mean-layers image').length") == 2
    bad = "[...document.querySelectorAll('svg *')].filter(e => /NaN|Infinity|undefined/"
    assert browser.evaluate(bad + ".test(e.outerHTML)).length") == 0
    keys = browser.evaluate("[...document.querySelectorAll('tbody th')].map(e => e.textContent)")
    assert "sparsity.l1_coefficient" in keys


@pytest.mark.slow
def test_page_answers_to_the_reader(browser, page):
    opened(browser, page)
    browser.hover("#chart-loss .plot svg", across=0.5)
    tooltip = "document.querySelector('#chart-loss .tooltip').innerText"
    assert "tokens" in browser.evaluate(tooltip)
    assert "resumed" in browser.evaluate(tooltip)

    path = "document.querySelector('#chart-loss .series').getAttribute('d')"
    linear = browser.evaluate(path)
    browser.evaluate("document.querySelector('#chart-loss .controls button').click()")
    assert browser.evaluate(path) != linear

    shown = "[...new Set([...document.querySelectorAll('.series')].map(e => e.dataset.run))]"
    assert browser.evaluate(shown) == ["0", "1"]
    browser.evaluate("document.querySelector('#legend button').click()")
    assert browser.evaluate(shown) == ["1"]
    browser.evaluate("document.querySelectorAll('#legend button')[1].click()")
    assert browser.evaluate(shown) == []
    assert "All runs are hidden." in browser.evaluate("document.body.innerText")
    browser.evaluate("document.querySelectorAll('#legend button').forEach(b => b.click())")

    browser.evaluate(
        "(() => { const s = document.querySelector('#chart-position select');"
        "s.value = 'every'; s.dispatchEvent(new Event('change')); })()"
    )
    curves = "document.querySelectorAll('#chart-position .series').length"
    assert browser.evaluate(curves) == 4  # two layers of two runs
    browser.evaluate("document.querySelectorAll('.chart details').forEach(d => d.open = true)")
    browser.wait_for("[...document.querySelectorAll('.chart details')].every(d => d.innerText)")
    rows = "document.querySelectorAll('#chart-loss tbody tr').length"
    browser.wait_for(f"{rows} === 4")
    assert browser.problems() == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 380])
def test_page_fits_a_phone(browser, page, width):
    opened(browser, page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    outside = (
        "[...document.querySelectorAll('.chart svg text')].filter(e => {"
        "const b = e.getBoundingClientRect();"
        f"return b.left < 0 || b.right > {width}; }}).map(e => e.textContent)"
    )
    assert browser.evaluate(outside) == []
    browser.tap("#chart-loss .plot svg", across=0.8)
    box = browser.evaluate(
        "(({left, right, width}) => [left, right, width])"
        "(document.querySelector('#chart-loss .tooltip').getBoundingClientRect())"
    )
    assert box[2] > 50, "the values went away with the finger"
    assert 0 <= box[0] < box[1] <= width


LUMINANCE = """(() => {
  const probe = document.body.appendChild(document.createElement('i'));
  const luminance = (name) => {
    probe.style.color = `var(--${name})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const names = ['page', 'panel', 'text', 'muted', ...Array(8).keys().map((i) => `run-${i}`)];
  const found = Object.fromEntries(names.map((name) => [name, luminance(name)]));
  probe.remove();
  return found;
})()"""


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_contrast_in_light_and_dark(browser, page, dark):
    opened(browser, page, dark=dark)
    luminance = browser.evaluate(LUMINANCE)
    assert (luminance["page"] < 0.1) == dark

    def contrast(one, other):
        low, high = sorted((luminance[one], luminance[other]))
        return (high + 0.05) / (low + 0.05)

    for ground in ("page", "panel"):
        assert contrast("text", ground) >= 7
        assert contrast("muted", ground) >= 4.5
        for i in range(8):
            assert contrast(f"run-{i}", ground) >= 3, i


@pytest.mark.slow
def test_page_prints_light_and_whole(browser, page, tmp_path):
    opened(browser, page, dark=True)
    browser.print_pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert browser.evaluate("getComputedStyle(document.querySelector('.controls')).display") == (
        "none"
    )
    browser.call("Emulation.setEmulatedMedia", media="")
    assert browser.problems() == []


def test_of_several_paths_those_without_records_are_skipped(tmp_path, train, cli_here):
    runs = train("validation.every_steps=0", "train.steps=1").path.parent
    (runs / "begun").mkdir()
    (runs / "begun" / "metrics.jsonl").write_text("")
    (runs / "notes.txt").write_text("")
    done = cli_here("report", *map(str, sorted(runs.iterdir())), "--out", str(tmp_path / "a.html"))
    assert f"skipped {runs}/begun: nothing was logged yet" in done.stderr
    assert f"skipped {runs}/notes.txt: it has no metrics.jsonl" in done.stderr
    assert (tmp_path / "a.html").is_file()
    alone = cli_here("report", runs / "begun", status=1)
    assert "nothing was logged yet, so there is nothing to report" in alone.stderr


def test_predicted_times_come_from_the_costs_and_the_unions(tiny):
    recipe = tiny("ffn.kernels=auto")
    run_path = write_run(recipe, [record(recipe, 1), record(recipe, 2)])
    [run] = read_runs([run_path])
    assert run.costs is None
    assert run_series(run)["lines"]["predicted_ffn_ms"] == {"x": [], "y": []}
    costs = {"dense": 3.0, "fixed": 1.0, "per_neuron": 0.01}
    kernels = {"device": "NVIDIA H200", "costs": costs, "paths": ["dense", "sparse"]}
    trainer = {"step": 2, "kernels": kernels}
    saver.save(run_path / "checkpoints", _snapshot({}, trainer), keep=1)
    [run] = read_runs([run_path])
    lines = run_series(run)["lines"]
    # Four micro-batches of 2 × 32 tokens; layer 0 dense, layer 1 sparse with a union of 21.
    assert lines["predicted_ffn_ms"]["y"] == [pytest.approx(4 * (3.0 + 1.0 + 0.21))] * 2
    assert lines["predicted_dense_ms"]["y"] == [24.0] * 2
    assert lines["step_ms"]["y"] == [pytest.approx(1e3 * 256 / 12_345, rel=1e-4)] * 2


def test_times_of_steps_stay_where_a_run_resumes_with_other_batches(tiny):
    before, after = tiny("train.global_batch_tokens=128"), tiny()
    lines = [record(before, 1), record(after, 2, micro_batch_size=1)]
    del lines[0]["micro_batch_size"]  # by an earlier version: it was the recipe's
    run_path = write_run(after, lines)
    costs = {"dense": 3.0, "fixed": 1.0, "per_neuron": 0.01}
    kernels = {"device": "NVIDIA H200", "costs": costs, "paths": ["dense", "dense"]}
    saver.save(run_path / "checkpoints", _snapshot({}, {"step": 2, "kernels": kernels}), keep=1)
    [run] = read_runs([run_path])
    lines = run_series(run)["lines"]
    ms = [1e3 * tokens / 12_345 for tokens in (128, 256)]
    assert lines["step_ms"]["y"] == pytest.approx(ms, rel=1e-4)
    assert lines["predicted_dense_ms"]["y"] == [12.0, 48.0]


def test_times_of_steps_that_were_not_recorded_follow_from_the_throughput(tiny):
    recipe = tiny()
    old = {key: value for key, value in record(recipe, 1).items() if key != "step_ms"}
    [run] = read_runs([write_run(recipe, [old])])
    ms = run_series(run)["lines"]["step_ms"]["y"]
    assert ms == [pytest.approx(1e3 * 256 / 12_345, rel=1e-4)]


def test_coefficients_by_layer_are_drawn_where_they_differ(tiny):
    recipe = tiny()
    [run] = read_runs([write_run(recipe, [record(recipe, 1)])])
    names = {heatmap["name"] for heatmap in chart_specs([run])["layerMetrics"]}
    assert "nnz_mean" in names
    assert "l1_coefficient" not in names
    [run] = read_runs([write_run(recipe, [record(recipe, 1, l1_by_layer=[0.01, 0.02])])])
    assert "l1_coefficient" in {h["name"] for h in chart_specs([run])["layerMetrics"]}


def test_figures_and_the_page_have_one_set_of_colours():
    css = (ROOT / "sparsellm" / "report" / "assets" / "style.css").read_text()
    light, dark = css.split("@media screen and (prefers-color-scheme: dark)", 1)
    names = ["page", "text", "muted", "line", "grid", *(f"run-{i}" for i in range(8))]
    colors = (drawing.PAGE, drawing.TEXT, drawing.MUTED, drawing.LINE, drawing.GRID)
    for name, color in zip(names, [*colors, *drawing.SERIES], strict=True):
        assert re.search(rf"--{name}: {color};", light), name
        assert re.search(rf"--{name}: {drawing.DARK[color]};", dark), name


def test_logarithmic_axes_have_plain_numbers():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    drawing.log_scale(axes.yaxis)
    axes.set_ylim(3e-5, 7e3)
    axes.figure.canvas.draw()
    written = {label.get_text() for label in axes.get_yticklabels() if label.get_text()}
    assert {"0.0001", "0.01", "1", "1,000"} <= written
    axes.set_ylim(4, 9)
    axes.figure.canvas.draw()
    small = {label.get_text() for label in axes.get_yticklabels(minor=True)} - {""}
    assert {"5", "6", "8"} <= small


@pytest.mark.parametrize("first", [1, 2, 3])
def test_records_of_an_earlier_version_are_shown(tiny, first):
    """Those before step ``first`` have the fields alone that every line has."""
    recipe = tiny()
    lines = [record(recipe, step) for step in (1, 2)]
    lines = [
        line if line["step"] >= first else {key: line[key] for key in ("kind", "step", "tokens")}
        for line in lines
    ]
    path = write_run(recipe, lines)
    [run] = read_runs([path])
    series = run_series(run)
    drawn = series["lines"]
    assert len(drawn["loss"]["x"]) == len(drawn["grad_norm"]["x"]) == 3 - first
    assert [bool(unions) for unions in series["heat"]["union_mean"]] == [first < 2, first < 3]
    for line in drawn.values():  # else the page would draw NaN
        assert {len(y) for y in line.get("layers", [line.get("y")])} <= {len(line["x"])}
    render_page([run])
