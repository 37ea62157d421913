"""Sweeps: what is planned, trained, skipped, resumed, refused and reported."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from conftest import ROOT, TINY, process_env, python, train_recipe
from runs.hf_models import short_text, write_chat_model
from runs.written_runs import record, write_run
from warm import ranks, started

from sparsellm.paths import bundled
from sparsellm.report.sweep_report import write_sweep_report
from sparsellm.report.sweep_runs import read_sweep
from sparsellm.runs.manifest import Manifest, read_manifest, write_manifest
from sparsellm.runs.telemetry.records import read_metrics
from sparsellm.sweep import worker
from sparsellm.sweep.folder import begin, check_sources, check_texts, is_finished
from sparsellm.sweep.plan import PlannedRun, load_plan

WARM = ROOT / "tests" / "sweep" / "warm_sweep.py"


@pytest.fixture
def sweep_file(tmp_path):
    """Writes a sweep of the tiny recipe."""

    def write(**changes):
        common = {key: yaml.safe_load(value) for key, value in (o.split("=") for o in TINY)}
        content = {
            "name": "tiny",
            "description": "Tiny & quick",
            "recipe": "debug",
            "set": common,
            "runs": [
                {"name": "dense-relu", "set": {"sparsity.l1_coefficient": 0}, "seeds": [0, 1]},
                {"name": "l1", "each": {"sparsity.l1_coefficient": [0.1]}},
            ],
        }
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(content | changes, sort_keys=False))
        return path

    return write


@pytest.mark.parametrize(
    "path", sorted(bundled("recipes").glob("sweeps/*.yaml")), ids=lambda p: p.stem
)
def test_bundled_sweeps_load(path):
    plan = load_plan(path.stem)
    assert plan.name == path.stem
    assert len({run.name for run in plan.runs}) == len(plan.runs)


def test_a_plan_is_every_setting_and_seed(sweep_file, tmp_path):
    each = {"sparsity.l1_coefficient": ["1e-4", 0.01], "ffn.gated": [True, False]}
    path = sweep_file(runs=[{"name": "a", "each": each, "seeds": [3, 4]}])
    plan = load_plan(str(path), ["train.steps=5", f"logging.run_dir={tmp_path}"])
    assert plan.folder == tmp_path / "tiny"
    assert [run.name for run in plan.runs][:3] == [
        "a-0.0001-true-seed3",
        "a-0.0001-true-seed4",
        "a-0.0001-false-seed3",
    ]
    last = plan.runs[-1]
    assert (last.group, last.recipe.seed) == ("a-0.01-false", 4)
    assert (last.recipe.ffn.gated, last.recipe.sparsity.l1_coefficient) == (False, 0.01)
    assert (last.recipe.train.steps, last.recipe.run_path) == (5, plan.folder / last.name)


def test_large_numbers_are_whole_in_the_names_of_runs(sweep_file):
    each = {"sparsity.dead_window_tokens": [1048576, 1048577], "model.rope_theta": ["1e6"]}
    path = sweep_file(runs=[{"name": "a", "each": each}])
    names = [run.name for run in load_plan(str(path)).runs]
    assert names == ["a-1048576-1000000-seed0", "a-1048577-1000000-seed0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sets": {}}, "unknown key 'sets'; nearest valid key: 'set'"),
        ({"set": {"train.step": 3}}, "unknown key 'train.step'; nearest .*'train.steps'"),
        ({"set": {"seed": 3}}, "key 'seed' is the sweep's own"),
        ({"set": {"logging": {"run_dir": "x"}}}, "key 'logging.run_dir' is the sweep's own"),
        ({"runs": [{"name": "a"}, {"name": "a"}]}, "two runs are called a-seed0"),
        (
            {"runs": [{"name": "a"}, {"name": "a", "seeds": [1], "set": {"train.steps": 3}}]},
            "runs of the group a, which are averaged, differ in more than their seed",
        ),
        (
            {"runs": [{"name": "a", "each": {"data.corpus": ["/texts"]}}]},
            "`each` of a makes a run 'a-/texts-seed0', .* one entry of `runs` for each .* `set`",
        ),
        ({"runs": [{"name": "a", "seeds": []}]}, r"key 'runs\.0\.seeds': must have at least 1"),
        ({"runs": [{"name": "a", "each": {"seed": []}}]}, r"each\.seed': must have at least 1"),
        ({"recipe": "none"}, "recipe 'none': no such file"),
        ({"runs": [{"name": "a", "init_from": "b-seed0"}]}, "no run 'b-seed0' is listed before it"),
        (
            {
                "runs": [
                    {"name": "a"},
                    {"name": "b", "set": {"model.intermediate_size": 96}, "init_from": "a-seed0"},
                ]
            },
            r"init_from of b: a-seed0 holds a model of other shapes .*intermediate_size \d+ → 96\)",
        ),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_runs(sweep_file, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_plan(str(sweep_file(**change)))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed"),
        ("name=1", "name"),
        ("sparsity.l1_coefficient=1", "sparsity.l1_coefficient"),
        ("sparsity={reinit_rate: 0, l1_coefficient: 1}", "sparsity.l1_coefficient"),
    ],
)
def test_what_the_names_of_the_runs_say_is_not_overridden(sweep_file, override, key):
    with pytest.raises(ValueError, match=f"--set {key}: the runs of .*tiny.yaml are named by it"):
        load_plan(str(sweep_file()), [override])


def test_a_part_of_a_value_by_which_runs_are_named_is_not_overridden(sweep_file):
    each = {"model.huggingface": [{"attention_bias": True}]}
    path = sweep_file(runs=[{"name": "a", "each": each}])
    with pytest.raises(ValueError, match=r"--set model\.huggingface\.attention_bias: the runs"):
        load_plan(str(path), ["model.huggingface.attention_bias=false"])


def test_a_section_that_is_set_whole_is_its_keys(sweep_file):
    runs = [{"name": "a", "set": {"sparsity": {"l1_coefficient": 0.5, "l1_zero_steps": 1}}}]
    (run,) = load_plan(str(sweep_file(runs=runs)), ["sparsity={l1_coefficient: 0.25}"]).runs
    assert run.changes == ("sparsity.l1_zero_steps=1",)  # as --list shows them
    assert run.recipe.sparsity.l1_coefficient == 0.25


def test_an_override_need_not_fit_the_recipe_without_the_sweep(sweep_file, error_of, cli_here):
    sweep = sweep_file(runs=[{"name": "a", "set": {"optimizer.name": "muon"}}])
    command = ["sweep", str(sweep), "--list", "--set"]
    assert "a-seed0" in cli_here(*command, "optimizer.gate_optimizer=muon").stdout
    assert "debug.yaml with --set train.stps=3: unknown key" in error_of(*command, "train.stps=3")


def test_runs_are_chosen_by_name(sweep_file, error_of, cli_here):
    command = ["sweep", str(sweep_file()), "--list", "--only"]
    lines = [
        " ".join(line.split()) for line in cli_here(*command, "dense-*1", "l1*").stdout.splitlines()
    ]
    assert lines == [
        "run tokens state settings",
        "dense-relu-seed1 1,024 to do sparsity.l1_coefficient=0",
        "l1-0.1-seed0 1,024 to do sparsity.l1_coefficient=0.1",
    ]
    error = error_of(*command, "l1*", "none*")
    assert "no run is called 'none*'; --list instead of --only lists" in error
    sweep = sweep_file(runs=[{"name": "a", "set": {"ffn.gated": False, "optimizer.beta2": 0.9}}])
    printed = cli_here("sweep", sweep, "--list", "--set", "ffn.gated=true").stdout
    assert "  optimizer.beta2=0.9" in printed
    sweep = sweep_file(runs=[{"name": "a"}, {"name": "b", "init_from": "a-seed0"}])
    assert "  init_from=a-seed0" in cli_here("sweep", sweep, "--list").stdout


def test_the_bundled_sweeps_are_listed_without_a_name_and_by_the_word(cli_here):
    listed = cli_here("sweep").stdout
    assert listed.startswith("fair-0.5b")
    assert cli_here("sweep", "list").stdout == listed


def test_text_that_is_not_there_is_told_before_any_run_and_before_torch(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARSELLM_DATA", raising=False)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from sparsellm.cli import main\nsys.exit(main(['sweep', 'quality', '--set', "
        f"'logging.run_dir={tmp_path}']))"
    )
    done = python("-c", code, status=1)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "${SPARSELLM_DATA}/train*.parquet' names an environment variable" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_sweep_trains_skips_resumes_and_reports(sweep_file, tmp_path, cli_here):
    runs = [
        {"name": "dense-relu", "set": {"sparsity.l1_coefficient": 0}},
        {"name": "l1", "each": {"sparsity.l1_coefficient": [0.1]}, "init_from": "dense-relu-seed0"},
    ]
    command = ["sweep", str(sweep_file(runs=runs)), "--set", f"logging.run_dir={tmp_path}"]
    timed_out = cli_here(*command, "--seconds", "-1", "--only", "dense-*", status=1)
    assert timed_out.stdout.count("not started: the time limit has passed") == 1
    assert "1 of 1 run is not finished: dense-relu-seed0;" in timed_out.stderr
    done = cli_here(*command)
    folder = tmp_path / "tiny"
    # A line of progress, printed only now and then, can name a loss, too.
    summarised = re.findall(r"(\S+): validation loss \d\.\d{4}, \d+\.\d non-zeros, ", done.stdout)
    assert summarised == ["dense-relu-seed0", "l1-0.1-seed0"]
    assert re.search(
        r"\n +active +validation loss +tokens/s\ndense-relu +\d+\.\d +\d\.\d{4} +", done.stdout
    )
    started = f"l1-0.1-seed0: started; its log is {folder / 'l1-0.1-seed0' / 'train.log'}"
    assert started in done.stdout
    assert str(folder / "report.html") in done.stdout
    first, second = (read_metrics(folder / name) for name in ("dense-relu-seed0", "l1-0.1-seed0"))
    end = first[0]["started_at"] + first[-1]["seconds"]
    assert (first[-1]["kind"], first[0]["pid"]) == ("session_end", second[0]["pid"])
    assert second[0]["started_at"] >= end  # its wall time is not that of the whole worker
    trainer = json.loads(
        (folder / "l1-0.1-seed0/checkpoints/step_00000004/trainer.json").read_text()
    )
    source = folder / "dense-relu-seed0" / "checkpoints" / "step_00000004"
    assert trainer["init_from"] == {
        "name": "dense-relu-seed0",
        "step": 4,
        "tokens": 1024,
        "path": str(source),
        "id": read_manifest(source).id,
    }
    assert second[0]["init_from"] == trainer["init_from"]
    assert "init_from" not in first[0]
    killed = folder / "l1-0.1-seed0"  # after step 3, whose last checkpoint is step 2's
    whole = _losses(killed)
    _go_back(killed, 2)
    assert len(_losses(killed)) < len(whole)
    shutil.rmtree(folder / "dense-relu-seed0" / "checkpoints")  # what is finished needs none
    again = ranks(1, str(WARM), *command)
    assert again.stdout.count("finished before") == 1
    assert "resuming from" in (killed / "train.log").read_text()
    assert _losses(killed) == whole


def test_a_sweep_resumes_and_reports_without_the_folder_of_its_tokenizer(sweep_file, tmp_path):
    folder = write_chat_model(tmp_path / "theirs")
    path = sweep_file(runs=[{"name": "a"}, {"name": "b"}])
    words = [*short_text(tmp_path), f"data.tokenizer=hf:{folder}", f"logging.run_dir={tmp_path}"]

    def finished():
        return [is_finished(run) for run in load_plan(str(path), words).runs]

    for run in load_plan(str(path), words).runs:
        train_recipe(run.recipe)
    killed = tmp_path / "tiny" / "b-seed0"
    _go_back(killed, 2)
    folder.rename(tmp_path / "moved")
    assert finished() == [True, False]
    plan = load_plan(str(path), words)
    train_recipe(plan.runs[1].recipe)
    assert finished() == [True, True]
    begin(plan)
    write_sweep_report(plan.folder)
    shutil.rmtree(killed / "checkpoints" / "step_00000002")  # pruned
    assert finished() == [True, True]
    (tmp_path / "moved").rename(folder)
    assert finished() == [True, True]


def test_runs_that_read_other_text_are_not_compared(sweep_file, tmp_path, monkeypatch):
    """The environment variable in a corpus file may have another value than it had before."""
    path = sweep_file(runs=[{"name": "a"}, {"name": "b"}])
    options = [f"logging.run_dir={tmp_path}", "data.corpus=local"]
    for name in ("one", "two", "one again"):
        (tmp_path / name).mkdir()
        line = json.dumps({"text": f"Text {name[:3]}. " * 2000}) + "\n"
        for split in ("train", "validation"):
            (tmp_path / name / f"{split}.jsonl").write_text(line)
    monkeypatch.setenv("SPARSELLM_DATA", str(tmp_path / "one"))
    plan = load_plan(str(path), options)
    first, second = plan.runs
    train_recipe(first.recipe)
    monkeypatch.setenv("SPARSELLM_DATA", str(tmp_path / "one again"))
    check_texts(plan, [first, second], {first.name})
    monkeypatch.setenv("SPARSELLM_DATA", str(tmp_path / "two"))
    for chosen, done in (([first, second], {first.name}), ([second], set())):
        with pytest.raises(ValueError, match="a-seed0 has read other text of corpus local than"):
            check_texts(plan, chosen, done)
    check_texts(plan, [first], set())  # it resumes, and checks its own position


def _go_back(run_path, step):
    """As if the run, which has checkpoints after steps 2 and 4, had been killed after the next."""
    shutil.rmtree(run_path / "checkpoints" / "step_00000004")
    (run_path / "checkpoints" / "latest").write_text(f"step_{step:08}")
    file = run_path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] <= step + 1))


def test_a_sweep_leaves_pytorch_to_its_workers():
    """Its runs start seconds earlier: what would take as long cannot be imported here."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers', 'pyarrow'])\n"
        "import sparsellm.sweep.runner"
    )
    python("-c", code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signal_name",
    [*(pytest.param(h, marks=pytest.mark.long) for h in ("once", "kill")), "twice, to all"],
)
def test_a_signal_saves_the_runs_and_leaves_no_worker(sweep_file, tmp_path, signal_name):
    each = {"train.steps": 100_000}
    runs = [{"name": "long", "set": each, "seeds": [0, 1]}, {"name": "never"}]
    program = (str(WARM),) if signal_name == "twice, to all" else ("-m", "sparsellm")
    program += ("sweep", str(sweep_file(runs=runs)))
    program += ("--set", f"logging.run_dir={tmp_path}", "--jobs", "2")
    logs = [tmp_path / "tiny" / f"long-seed{seed}" / "train.log" for seed in (0, 1)]
    with started(*program) as (sweep, lines):
        while not all(log.is_file() and "step      2/" in log.read_text() for log in logs):
            assert sweep.poll() is None, list(lines)
            time.sleep(0.1)
        workers = psutil.Process(sweep.pid).children(recursive=True)
        sweep.send_signal(signal.SIGKILL if signal_name == "kill" else signal.SIGTERM)
        if signal_name == "twice, to all":  # as `timeout` and a terminal's Ctrl-C do
            for process in [*workers, sweep]:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            sweep.send_signal(signal.SIGTERM)
        assert sweep.wait(timeout=60) != 0
    assert not psutil.wait_procs(workers, timeout=30)[1]
    assert all("the same command resumes here" in log.read_text() for log in logs)
    assert not (tmp_path / "tiny" / "never-seed0").exists()


@pytest.mark.long
def test_a_run_on_two_processes_computes_what_one_does(sweep_file, tmp_path, cli_here):
    runs = [{"name": "l1"}]
    command = ["sweep", str(sweep_file(runs=runs)), "--set", f"logging.run_dir={tmp_path}"]
    cli_here(*command, "--gpus-per-run", "2")
    run_path = tmp_path / "tiny" / "l1-seed0"
    records = read_metrics(run_path)
    assert next(r for r in records if r["kind"] == "session")["ranks"] == 2
    launched = _losses(run_path)
    assert cli_here(*command).stdout.count("finished before") == 1
    shutil.rmtree(run_path)
    cli_here(*command)
    assert [loss for _, loss in launched] == pytest.approx([x for _, x in _losses(run_path)], 1e-4)


def test_a_launched_run_that_resumes_does_without_its_source(tiny, tmp_path, monkeypatch):
    sources = []

    def command(config, gpus, recipe, overrides, init_from):
        sources.append(init_from)
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(worker, "train_command", command)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    recipe = tiny(f"logging.run_dir={tmp_path}")
    worker.train_launched(recipe, tmp_path / "source", 2, "ddp8")
    newest = recipe.run_path / "checkpoints" / "step_00000002"
    newest.mkdir(parents=True)
    (newest.parent / "latest").write_text(newest.name)
    worker.train_launched(recipe, tmp_path / "source", 2, "ddp8")
    assert sources == [tmp_path / "source", None]


def test_gpus_that_make_no_groups_are_refused_before_anything_runs(sweep_file, tmp_path, error_of):
    command = ["sweep", str(sweep_file()), "--set", f"logging.run_dir={tmp_path}"]
    for options, why in (
        ("--gpus 0 1 2 --gpus-per-run 2", "3 GPUs are not a multiple of --gpus-per-run 2"),
        ("--gpus-per-run 3", "is not a multiple of 3 ranks"),
        ("--gpus-per-run 2 --config ddp", "no such file in launch/"),
    ):
        assert why in error_of(*command, *options.split())
    assert not (tmp_path / "tiny").exists()


@pytest.mark.long
def test_a_signal_saves_a_launched_run(sweep_file, tmp_path):
    runs = [{"name": "long", "set": {"train.steps": 100_000}}]
    command = [sys.executable, "-m", "sparsellm", "sweep", str(sweep_file(runs=runs))]
    command += ["--set", f"logging.run_dir={tmp_path}", "--gpus-per-run", "2"]
    with subprocess.Popen(command, env=process_env(), stderr=subprocess.PIPE, text=True) as sweep:
        log = tmp_path / "tiny" / "long-seed0" / "train.log"
        while not (log.is_file() and "step      2/" in log.read_text()):
            assert sweep.poll() is None, sweep.stderr.read()
            time.sleep(0.1)
        started = psutil.Process(sweep.pid).children(recursive=True)
        sweep.terminate()
        assert sweep.wait() != 0
    assert "the same command resumes here" in log.read_text()
    assert not psutil.wait_procs(started, timeout=10)[1]


def _losses(run_path):
    return [(r["kind"], r["loss"]) for r in read_metrics(run_path) if "loss" in r]


def _write_sweep(folder, tiny, more=()):
    runs = []
    for name, seed, l1, losses in (
        ("dense-relu-seed0", 0, 0.0, 5.0),
        ("dense-relu-seed1", 1, 0.0, 5.2),
        ("l1", 0, 0.02, 5.151),
        *((name, 0, l1, loss) for name, l1, loss in more),
    ):
        recipe = tiny(
            f"name={name}",
            f"seed={seed}",
            f"sparsity.l1_coefficient={l1}",
            f"logging.run_dir={folder}",
        )
        held_out = {
            "kind": "validation",
            "step": 4,
            "tokens": 1024,
            "loss": losses,
            "num_targets": 8,
        }
        records = [record(recipe, step, l1_coefficient=l1) for step in (1, 2, 3, 4)]
        write_run(recipe, [*records, held_out])
        runs.append({"name": name, "group": name.removesuffix(f"-seed{seed}"), "seed": seed})
    content = {"name": "tiny", "description": "Tiny & quick", "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(content))


def test_the_report_groups_seeds_and_compares_with_dense_relu(tiny, tmp_path, cli_here):
    _write_sweep(tmp_path, tiny)
    lines = [
        {"bench": "model_forward", "case": {"run": run}, "metric": metric, "ratio": ratio}
        for run, metric, ratio in (
            ("l1", "tokens_per_ms", 9.0),  # it was measured again
            ("l1", "tokens_per_ms", 1.25),
            ("l1", "sparse_layers", None),
            ("of another sweep", "tokens_per_ms", 9.0),
        )
    ]
    analysed = tmp_path / "l1" / "checkpoints" / "analysis_step_00000004"
    analysed.mkdir(parents=True)
    layer = {"nnz_mean": 2.5, "nnz_p99": 9, "tile_max": 4, "never_fired_fraction": 0.25}
    layer |= {"union": {"64": 31, "128": 40, "256": 50}, "hot_share": {"256": 1.0}}
    token = {"text": "<the>", "nnz_mean": 1.25}
    analysis = {"tokens": 4096, "corpus": "sample", "step": 4, "layers": [layer] * 2}
    analysis |= {"tokens_by_nnz": {"lowest": [token], "highest": [token]}}
    (analysed / "statistics.json").write_text(json.dumps(analysis))
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, table, summary, figure = write_sweep_report(tmp_path)
    groups = {g["group"]: g for g in json.loads(summary.read_text())}
    assert groups["dense-relu"]["held_out_losses"] == [5.0, 5.2]
    assert groups["l1"]["nnz"] == pytest.approx(3.0)  # of the last record: 2.5 and 3.5
    assert groups["l1"]["forward_ratio"] == 1.25
    row = next(line for line in table.read_text().splitlines() if line.startswith("| l1 "))
    assert "| +3.02% |" in row  # of 5.0 by the same seed: the other seed's loss is 5.2
    assert "\n| dense-relu | 2 |" in table.read_text()  # seeds
    assert "5.1000\u00a0±\u00a00.1000" in table.read_text()
    html = page.read_text()
    assert html.count("data:image/svg+xml;base64,") == 1
    assert "Mean task score: no run has a mean task score" in html
    assert "<code>sparsellm eval RUN</code>" in html
    assert "Forward of the model: energy: no forward was measured" in html
    assert "<h1>tiny</h1>" in html
    svg = figure.read_text()
    titles = ("Validation loss", "Training", "Forward of the model: speed")
    assert all(f">{title}</text>" in svg for title in titles)
    assert ">Mean task score</text>" not in svg
    assert "prefers-color-scheme: dark" in svg
    assert "Tiny &amp; quick" in html
    assert "Held-out text, l1: 4,096 tokens of sample, step 4" in html
    assert "&#x27;&lt;the&gt;&#x27; 1.2" in html
    cli_here("report", "--sweep", tmp_path)


def test_runs_that_have_not_ended_are_named_under_the_table(tiny, tmp_path):
    _write_sweep(tmp_path, tiny)
    metrics = tmp_path / "l1" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(True)[:3]))
    page, table, *_ = write_sweep_report(tmp_path)
    sentence = "Not trained to the end: l1 (step 3 of 4)."
    assert sentence in table.read_text()
    assert sentence in page.read_text()
    session = {"step": 0, "tokens": 0}
    end = {"kind": "session_end", "step": 4, "tokens": 1024, "session": "A", "how": "finished"}
    validation = {"kind": "validation", "step": 3, "tokens": 768, "num_targets": 8, "loss": 5.0}
    # Its last step was skipped, and its last validation failed:
    records = [session | {"kind": "session", "id": "A"}, validation, end]
    metrics.write_text(metrics.read_text() + "".join(json.dumps(r) + "\n" for r in records))
    page, table, summary, *_ = write_sweep_report(tmp_path)
    assert "Not trained" not in table.read_text()
    assert json.loads(summary.read_text())[1]["tokens"] == [1024]
    assert "Tokens trained on" not in table.read_text()  # as many as the other group
    assert "Validated before the last step: l1 (step 3 of 4)." in table.read_text()


def test_a_run_that_has_ended_early_is_left_out_of_the_means_of_its_seeds(tiny, tmp_path):
    _write_sweep(tmp_path, tiny)
    for name in ("dense-relu-seed1", "l1"):
        metrics = tmp_path / name / "metrics.jsonl"
        held_out = json.dumps({"kind": "validation", "step": 1, "tokens": 256, "loss": 9.0}) + "\n"
        records = metrics.read_text().splitlines(True)[:2]
        metrics.write_text("".join(records) + (held_out if name != "l1" else ""))
    _, table, summary, *_ = write_sweep_report(tmp_path)
    dense, l1 = json.loads(summary.read_text())
    assert (dense["seeds"], dense["held_out_losses"]) == ([0], [5.0])
    assert (l1["steps"], l1["held_out_losses"]) == ([2], [])
    text = table.read_text()
    assert "nan" not in text
    assert "Not trained to the end: l1 (step 2 of 4)." in text
    left_out = (
        "Not trained to the end, and left out of their groups: dense-relu-seed1 (step 2 of 4)."
    )
    assert left_out in text
    assert [run.label for run in read_sweep(tmp_path).runs][1] == "dense-relu-seed1"


def test_a_loss_of_an_earlier_step_is_named_under_the_table(tiny, tmp_path):
    _write_sweep(tmp_path, tiny)
    assert "Validated before" not in write_sweep_report(tmp_path)[1].read_text()
    metrics = tmp_path / "l1" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    changed = [line | ({"step": 2} if line["kind"] == "validation" else {}) for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in changed))
    text = write_sweep_report(tmp_path)[1].read_text()
    assert "Validated before the last step: l1 (step 2 of 4)." in text
    assert "Not trained to the end" not in text


def test_groups_that_began_elsewhere_or_read_more_are_named_under_the_table(tiny, tmp_path):
    _write_sweep(tmp_path, tiny)
    assert "Began" not in (text := write_sweep_report(tmp_path)[1].read_text())
    assert "Tokens trained on" not in text
    origin = {"name": "dense-relu-seed0", "step": 4, "tokens": 1024}
    session = {"kind": "session", "step": 0, "id": "A", "init_from": origin}
    metrics = tmp_path / "l1" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [session, *(line | {"tokens": 2 * line["tokens"]} for line in lines)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, table, *_ = write_sweep_report(tmp_path)
    for file in (page, table):
        assert "Began with the weights of another run: l1 (dense-relu-seed0)." in file.read_text()
        assert "Tokens trained on: 1,024 (dense-relu), 2,048 (l1)." in file.read_text()


def test_of_two_dense_groups_none_is_the_baseline(tiny, tmp_path):
    _write_sweep(tmp_path, tiny, more=[("dense-relu-wide", 0.0, 4.0)])
    table = write_sweep_report(tmp_path)[1].read_text()
    row = next(line for line in table.splitlines() if line.startswith("| l1 "))
    assert "%" not in row.split("5.1510")[1]


def test_groups_that_differ_in_lambda_alone_are_one_curve(tiny, tmp_path):
    _write_sweep(tmp_path, tiny, [("l1-1e-05", 1e-5, 5.3), ("l1-0.0003", 3e-4, 5.15)])
    assert [(i, [g.group for g in family]) for i, family in read_sweep(tmp_path).families()] == [
        (0, ["dense-relu"]),
        (1, ["l1", "l1-1e-05", "l1-0.0003"]),
    ]
    figure = write_sweep_report(tmp_path)[-1]
    shown = re.findall(r">([^<>]+)</text>", figure.read_text())
    assert shown.count("l1, λ at each point") == 1
    assert {"2e-2", "1e-5", "3e-4"} <= set(shown)
    assert "l1-0.0003" not in shown


def test_a_folder_that_is_not_a_sweep_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"has no sweep.json; give a folder that `sparsellm sweep` wrote"
    ):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text('{"name": "x", "description": "", "runs": []}')
    with pytest.raises(FileNotFoundError, match=r"none of its runs has a record yet"):
        read_sweep(tmp_path)


def test_a_run_of_another_recipe_is_not_taken_for_a_finished_one(sweep_file, tiny, tmp_path):
    _write_sweep(tmp_path, tiny)
    recipe = tiny("name=l1", "sparsity.l1_coefficient=0.02", f"logging.run_dir={tmp_path}")
    assert is_finished(PlannedRun("l1", "l1", recipe))
    assert {r["step"] for r in read_metrics(recipe.run_path)} == {1, 2, 3, 4}
    changed = recipe.model_copy(update={"seed": 7})
    with pytest.raises(ValueError, match=r"is a run of another recipe \(it differs in seed"):
        is_finished(PlannedRun("l1", "l1", changed))


def test_seeds_of_other_settings_are_not_averaged(sweep_file, tiny, tmp_path, error_of):
    folder = tmp_path / "tiny"
    _write_sweep(folder, tiny)
    shutil.rmtree(folder / "dense-relu-seed1")
    command = ["sweep", str(sweep_file()), "--set", f"logging.run_dir={tmp_path}"]
    command += ["--set", "optimizer.learning_rate=0.5", "--only", "dense-relu-seed1"]
    error = error_of(*command)
    assert "dense-relu-seed0 is a run of another recipe (it differs in optimizer.learn" in error
    assert not (folder / "dense-relu-seed1" / "train.log").exists()


def test_a_run_that_began_with_other_weights_is_not_taken_for_a_finished_one(tiny, tmp_path):
    _write_sweep(tmp_path, tiny)
    recipe = tiny("name=l1", "sparsity.l1_coefficient=0.02", f"logging.run_dir={tmp_path}")
    metrics, source = recipe.run_path / "metrics.jsonl", tmp_path / "dense-relu-seed0"
    trained = metrics.read_text()
    alone, after = (PlannedRun("l1", "l1", recipe, init) for init in (None, source.name))

    def begun_with(init_from):
        session = {"kind": "session", "step": 0, "id": "A", "init_from": init_from}
        metrics.write_text(f"{json.dumps(session)}\n{trained}")

    begun_with(None)
    assert is_finished(alone)
    with pytest.raises(ValueError, match=r"/l1 began with random weights, and would with those of"):
        is_finished(after)
    begun_with({"name": source.name, "step": 4, "tokens": 1024, "id": "first"})
    with pytest.raises(ValueError, match=r"began with weights of dense-.*, and would with random"):
        is_finished(alone)
    assert is_finished(after)  # its source's checkpoints are gone
    folder = source / "checkpoints" / "step_00000004"
    folder.mkdir(parents=True)
    for number in ("first", "second"):  # the source was trained, and trained again
        manifest = Manifest(id=number, ancestors=[], step=4, created="", world_size=1, files={})
        write_manifest(folder, manifest)
        if number == "first":
            assert is_finished(after)
    with pytest.raises(ValueError, match=r"/l1 began with weights of dense-.* no longer its last"):
        is_finished(after)
    dense = PlannedRun(source.name, "dense-relu", recipe)
    check_sources([after], {"l1"})
    check_sources([dense, after], {"l1", source.name})
    with pytest.raises(ValueError, match=r"dense-relu-seed0, which is not finished and will have"):
        check_sources([dense, after], {"l1"})


def test_two_sweeps_of_one_name_do_not_replace_each_others_summary(sweep_file, tiny, tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    _write_sweep(folder, tiny)
    write_sweep_report(folder)
    written = (folder / "sweep.json").read_text()
    runs = [{"name": "dense-relu", "seeds": [0, 1]}, {"name": "other"}]
    plan = load_plan(str(sweep_file(runs=runs)), [f"logging.run_dir={tmp_path}"])
    refused = r"tiny holds runs of another sweep called tiny \(l1\), which .* another `name`, or"
    with pytest.raises(ValueError, match=refused):
        begin(plan)
    assert (folder / "sweep.json").read_text() == written
    shutil.rmtree(folder / "l1")  # a run that the file no longer has
    begin(plan)
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["dense-relu-seed0", "dense-relu-seed1", "other-seed0"]


def test_a_run_whose_last_step_was_skipped_or_not_validated_is_finished(tiny, tmp_path):
    _write_sweep(tmp_path, tiny)
    recipe = tiny("name=l1", "sparsity.l1_coefficient=0.02", f"logging.run_dir={tmp_path}")
    path = recipe.run_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    failure = {"kind": "failure", "step": 4, "tokens": 1024, "error": ""}
    for missing, kind, finished in (
        ("train", "target", False),
        ("train", "step", True),
        ("validation", "target", False),
        ("validation", "validation", True),
    ):
        remaining = [line for line in lines if (line["kind"], line["step"]) != (missing, 4)]
        records = [*remaining, failure | {"what": kind}]
        path.write_text("".join(json.dumps(line) + "\n" for line in records))
        assert is_finished(PlannedRun("l1", "l1", recipe)) == finished
