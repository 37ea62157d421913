"""`sparsellm eval`: lm-eval's own scores, to the last digit, on one process and on several."""

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from conftest import python, set_arguments
from lm_eval import __main__ as lm_eval_main, utils
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager, manager
from lm_eval.tasks._yaml_loader import load_yaml as lm_eval_load_yaml
from runs.hf_models import write_chat_model
from runs.test_metrics_log import _offline_records
from transformers import GPT2TokenizerFast
from warm import ranks

import sparsellm
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.evaluate import suite as suite_module
from sparsellm.evaluate.cli import _beside
from sparsellm.evaluate.evaluator import Evaluator
from sparsellm.evaluate.examples import restart_examples
from sparsellm.evaluate.lm import SparseLM
from sparsellm.evaluate.scores import from_lm_eval, table
from sparsellm.evaluate.suite import build_tasks, load_suite, task_config, templates_compiled_once
from sparsellm.export.save_export import export, import_export
from sparsellm.model import build_model, model_config
from sparsellm.paths import bundled
from sparsellm.runs import checkpoint, state
from sparsellm.runs.huggingface import hf_config
from sparsellm.runs.huggingface.hf_tokenizer import stock_tokenizer
from sparsellm.runs.huggingface.pretrained import load_pretrained
from sparsellm.runs.telemetry.evaluations import read_evaluations
from sparsellm.runs.telemetry.records import read_metrics

SUITE = load_suite()
NAMES = list(SUITE.tasks)
STOCK = [name for name in NAMES if name != "commonsense_qa_cloze"]
PARTIAL = "mean of the scores with *: needs all 7 tasks"


@pytest.fixture(scope="session")
def data_dir(test_data, tmp_path_factory) -> Path:
    """The benchmarks' first rows: lm-eval reads all of them for each task that it builds."""
    folder = tmp_path_factory.mktemp("eval")
    for path in (test_data / "eval").glob("*/*.jsonl"):
        copy = folder / path.relative_to(test_data / "eval")
        copy.parent.mkdir(exist_ok=True)
        with path.open(encoding="utf-8") as rows:
            copy.write_text("".join(islice(rows, 100)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _few_stock_tasks(tmp_path_factory):
    """lm-eval reads all of its tasks' thousands of files before it runs one: seven seconds."""
    folder = tmp_path_factory.mktemp("lm_eval")
    for name in ("arc", "commonsense_qa", "hellaswag", "openbookqa", "piqa", "wikitext"):
        shutil.copytree(Path(manager.__file__).parent / name, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "__file__", str(folder / "manager.py"))
        yield


@pytest.fixture
def pair(tiny, gpt2_cache, tmp_path):
    """A random GPT-2-vocabulary model and its twin that stock transformers saved."""

    def build(dtype: torch.dtype, context_length: int, *overrides: str):
        shape = [f"model.context_length={context_length}"]
        shape += [f"train.global_batch_tokens={2 * context_length}"]
        recipe = tiny(*shape, "data.tokenizer=gpt2", *overrides)
        tokenizer = load_tokenizer("gpt2")
        ours = build_model(recipe, tokenizer.eot_id)
        stock = type(ours)(model_config(recipe, tokenizer.eot_id))  # transformers' own class
        state.restore_model(stock, state.gather_model(ours))
        folder = tmp_path / "stock"
        stock.to(dtype).save_pretrained(folder)
        _stock_tokenizer(gpt2_cache).save_pretrained(folder)
        return ours.to(dtype).eval(), _tokenizer("gpt2"), folder

    return build


def _tokenizer(name):
    """As `sparsellm eval` has it of a model that was trained here."""
    return stock_tokenizer(name, split_special_tokens=True)


def _stock_tokenizer(cache: Path) -> GPT2TokenizerFast:
    merges, vocabulary = sorted(cache.iterdir(), key=lambda path: path.stat().st_size)
    pairs = merges.read_text(encoding="utf-8").splitlines()
    return GPT2TokenizerFast(
        vocab=json.loads(vocabulary.read_text(encoding="utf-8")),
        merges=[tuple(pair.split()) for pair in pairs if not pair.startswith("#")],
    )


def _write(folder: Path, name: str, data_dir: Path | None) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(task_config(SUITE, name, data_dir)))
    return path


@pytest.fixture
def lm_eval_command(monkeypatch):
    """Runs lm-eval's own command, within this process, and reads its results file."""

    def run(stock: Path, tasks: Path, dtype: str, *arguments: str, names=tuple(NAMES)) -> dict:
        command = ["lm_eval", "--model", "hf", "--device", "cpu"]
        command += ["--model_args", f"pretrained={stock},dtype={dtype}", "--tasks", ",".join(names)]
        command += ["--include_path", str(tasks), "--output_path", str(tasks / "out.json")]
        monkeypatch.setattr(sys, "argv", [*command, *arguments])
        monkeypatch.setattr(lm_eval_main, "setup_logging", lambda: None)  # of the whole process
        lm_eval_main.cli_evaluate()
        (output_file,) = tasks.glob("out*.json")
        content = json.loads(output_file.read_text(encoding="utf-8"))
        output_file.unlink()
        return content

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "context_length", "limit"),
    [("float32", 64, 8), pytest.param("bfloat16", 64, 12, marks=pytest.mark.long)],
)
def test_scores_are_those_of_lm_evals_own_command(  # noqa: PLR0917
    pair, lm_eval_command, data_dir, tmp_path, dtype, context_length, limit
):
    gated = "true" if dtype == "float32" else "false"  # Llama and Arcee
    # Scored at the model's positions, which may be more than a training sequence has.
    overrides = [f"ffn.gated={gated}", "model.huggingface={max_position_embeddings: 72}"]
    ours, tokenizer, stock = pair(getattr(torch, dtype), context_length, *overrides)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name in NAMES:
        _write(tasks, name, data_dir)
    sizes = ("--limit", str(limit), "--batch_size", "16")
    evaluation = Evaluator(data_dir=data_dir, limit=limit, batch_size=16)
    scores = evaluation.run(ours, tokenizer)
    results = lm_eval_command(stock, tasks, dtype, *sizes)
    assert scores == from_lm_eval(results, SUITE, scores.num_requests, scores.num_cut)
    assert list(scores.tasks) == NAMES
    assert scores.num_requests > 7 * limit
    assert scores.num_cut > 0  # longer than the context, and cut as lm-eval cuts it


def test_a_model_from_elsewhere_is_scored_as_by_lm_evals_own_command(
    lm_eval_command, data_dir, tmp_path, monkeypatch, cli_here
):
    """Its texts begin with <bos>, which the scores of its folder, its import and its export need;
    and it has more positions than the recipe of its import has tokens in a sequence."""
    folder = tmp_path / "theirs"
    write_chat_model(folder, max_position_embeddings=512)
    monkeypatch.setattr(hf_config, "_CONTEXT", 32)
    import_export(folder, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "exported", "fp32")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    _write(tasks, "piqa", data_dir)
    few = ["--limit", "40", "--batch_size", "16"]
    expected = lm_eval_command(folder, tasks, "float32", *few, names=["piqa"])["results"]["piqa"]
    options = ["--tasks", "piqa", "--data-dir", str(data_dir)]
    options += ["--limit", "40", "--batch-size", "16"]
    for place in (folder, tmp_path / "run", tmp_path / "exported"):
        out = tmp_path / "scores.json"
        cli_here("eval", place, *options, "--out", out)
        scores = json.loads(out.read_text())["tasks"]["piqa"]
        for metric in ("acc", "acc_norm"):
            assert scores[metric] == expected[f"{metric},none"], (place, metric)
    answers = lm_eval_command(tmp_path / "exported", tasks, "float32", *few, names=["piqa"])
    assert answers["results"]["piqa"] == expected
    # The metric sees the first token.
    content = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    other = lm_eval_command(folder, tasks, "float32", *few, names=["piqa"])["results"]["piqa"]
    assert other["acc_norm,none"] != expected["acc_norm,none"]


def test_acc_norm_divides_by_characters(data_dir):
    """As eval/suite.yaml says of lm-eval: é is one of them, and two bytes."""
    (task,) = build_tasks(SUITE, ["piqa"], data_dir).values()
    doc = {"goal": "say", "sol1": "é" * 6, "sol2": "e" * 8, "label": 0}
    assert task.doc_to_choice(doc) == [doc["sol1"], doc["sol2"]]
    # Per character -1 and -1.25, per byte -0.5 and -1.25; then -2 and -1.25, -1 and -1.25.
    for first, expected in ((-6.0, 1.0), (-12.0, 0.0)):
        scores = task.process_results(doc, [(first, False), (-10.0, False)])
        assert scores["acc_norm"] == expected


def test_an_end_token_after_every_text_is_not_scored_as_an_answer(tmp_path):
    folder = write_chat_model(tmp_path / "theirs", "<bos> $A <eos>")
    model, tokenizer = sparsellm.load(folder)
    assert tokenizer("cats").input_ids[-1] == 1  # the user's own is as it was
    lm = SparseLM(model, tokenizer, batch_size=2, softmax_dtype=None)
    requests = [Instance("loglikelihood", {}, ("Q: why? A:", " because of 2,048 zeros"), 0)]
    (likelihood,) = lm.loglikelihood(requests)
    plain = sparsellm.load(write_chat_model(tmp_path / "plain"))
    reference = HFLM(pretrained=plain.model, tokenizer=plain.tokenizer, batch_size=2)
    assert likelihood == reference.loglikelihood(requests)[0]
    assert (
        lm.tok_batch_encode(["cats"])[0].tolist()
        == reference.tok_batch_encode(["cats"])[0].tolist()
    )
    wrong = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2).loglikelihood(requests)
    assert likelihood != wrong[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_likelihoods_are_those_of_the_stock_class(pair, device, dtype):
    ours, tokenizer, stock = pair(getattr(torch, dtype), context_length=80)
    requests = [
        Instance("loglikelihood", {}, arguments, index)
        for index, arguments in enumerate(
            [
                ("Question: why?\nAnswer:", " because"),
                ("Question: why?\nAnswer:", " therefore it rains"),
                ("a space belongs to the answer  ", "so"),
                ("", "no context: the prefix token stands before it"),
                ("žluťoučký kůň 漢字 🙂", " úpěl"),
                ("far too long " * 200, " for the context"),
            ]
        )
    ]
    options = {"batch_size": 4, "softmax_dtype": None}
    likelihoods = SparseLM(ours.to(device), tokenizer, **options).loglikelihood(requests)
    reference = HFLM(pretrained=str(stock), device=device, batch_size=4, dtype=dtype)
    assert reference.max_length == 80
    assert reference.prefix_token_id == tokenizer.eos_token_id
    assert likelihoods == reference.loglikelihood(requests)  # every bit


def test_an_answer_longer_than_the_context_is_scored_by_its_end(tiny):
    tokenizer = _tokenizer("bytes")
    model = build_model(tiny("model.context_length=16"), tokenizer.eos_token_id).eval()
    lm = SparseLM(model, tokenizer, batch_size=2, softmax_dtype=None)
    text = "a text's 17 bytes"
    questions = (("?", text), ("more" + text[0], text[1:]), (text[0], text[1:]))
    requests = [Instance("loglikelihood", {}, question, i) for i, question in enumerate(questions)]
    likelihoods = lm.loglikelihood(requests)
    assert likelihoods[0] == likelihoods[1] == likelihoods[2]
    assert (lm.num_requests, lm.num_cut, lm.num_answers_cut) == (3, 2, 1)


def test_a_model_that_computes_nan_has_no_score(tiny):
    tokenizer = _tokenizer("bytes")
    model = build_model(tiny(), tokenizer.eos_token_id).eval()
    lm = SparseLM(model, tokenizer, batch_size=2, softmax_dtype=None)
    requests = [Instance("loglikelihood", {}, ("1+1=", f" {i}"), i) for i in (2, 3)]
    assert all(likelihood < 0 for likelihood, _ in lm.loglikelihood(requests))
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    with pytest.raises(ValueError, match=r"of the text ' 2' is NaN: .*--dtype fp32"):
        lm.loglikelihood(requests)
    with pytest.raises(ValueError, match=r"of the text 'one two' is NaN"):
        lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("one two",), 0)])
    with pytest.raises(ValueError, match=r"a logit of the model is NaN: .*--dtype fp32"):
        lm.generate_until([Instance("generate_until", {}, ("1+1=", {"max_gen_toks": 3}), 0)])


@pytest.mark.parametrize("name", STOCK)
def test_without_a_data_directory_it_is_the_stock_task(name, tmp_path):
    path = _write(tmp_path, name, None)
    written = yaml.safe_load(path.read_text())
    stock = lm_eval_load_yaml(written.pop("include"), resolve_func=False)
    # Splits and prompt are lm-eval's; so is the dataset, at a commit of it.
    assert written.pop("dataset_path") == stock["dataset_path"]
    [(key, revision)] = written.pop("dataset_kwargs").items()
    assert (key, len(revision), int(revision, 16) > 0) == ("revision", 40, True)
    assert written == {"task": name}
    assert lm_eval_load_yaml(path)["task"] == name


def test_the_hub_is_read_at_the_pinned_revision(monkeypatch):
    """datasets gets the commit; what it would load from the network is made up here."""
    revisions = {}

    def load_dataset(path=None, name=None, **options):
        revisions.update(path=path, **options)
        row = {"goal": "Open a jar", "sol1": "twist", "sol2": "push", "label": 0}
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_list([row] * 2) for split in ("train", "validation")}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    build_tasks(SUITE, ["piqa"], None)
    assert revisions["path"] == "baber/piqa"
    assert revisions["revision"] == SUITE.tasks["piqa"].revision


@pytest.mark.parametrize("name", NAMES)
def test_with_one_only_the_rows_come_from_elsewhere(name, tmp_path):
    task = yaml.safe_load((bundled("eval") / "tasks" / f"{name}.yaml").read_text())
    for file in task["dataset_kwargs"]["data_files"].values():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("{}\n")
    path = _write(tmp_path, name, tmp_path)
    ours = lm_eval_load_yaml(path, resolve_func=False)
    stock = lm_eval_load_yaml(yaml.safe_load(path.read_text())["include"], resolve_func=False)
    changed = {key for key in ours.keys() | stock.keys() if ours.get(key) != stock.get(key)}
    prompt = {"task", "doc_to_text", "doc_to_target", "doc_to_choice", "metric_list", "metadata"}
    assert changed - set(suite_module.DATA_KEYS) == (set() if name in STOCK else prompt)


@pytest.mark.slow
def test_cli_prints_a_table_and_writes_json_beside_the_checkpoint(
    train, cli_here, error_of, data_dir, tmp_path
):
    trained = train("validation.every_steps=0")
    run = trained.path
    command = ["eval", str(run), "--data-dir", str(data_dir), "--limit", "9"]
    result = cli_here(*command)
    assert "kernels: dense" in result.stdout
    assert "mean of the 7 scores with *:" in result.stdout
    path = run / "checkpoints" / "eval_step_00000004_limit9.json"
    assert f"saved {path}" in result.stdout
    report = json.loads(path.read_text())
    assert list(report["tasks"]) == NAMES
    assert (report["step"], report["limit"], report["dtype"]) == (4, 9, "float32")
    scores = [report["tasks"][name][SUITE.tasks[name].metric] for name in STOCK]
    assert report["mean"] == sum(scores) / 7
    # Training still finds its checkpoint beside the report.
    assert "step 6/6" in train("validation.every_steps=0", "train.steps=6").stdout

    out = tmp_path / "two.json"
    some = ("--tasks", "piqa, winogrande", "--out", str(out), "--dtype", "bf16")
    some += ("--kernels", "sparse")
    checkpoint = trained.checkpoint(4)
    result = cli_here("eval", str(checkpoint), *command[2:], *some)
    assert f"{PARTIAL} (not run: arc_easy" in result.stdout, result.stderr
    report = json.loads(out.read_text())
    assert list(report["tasks"]) == ["piqa", "winogrande"]
    assert (report["mean"], report["dtype"]) == (None, "bfloat16")
    assert report["kernels"] == "sparse"
    wide = error_of("eval", checkpoint, *command[2:], "--tasks", "piqa", "--kernels", "auto")
    assert "auto: model.layers.0.mlp and 1 more: its weights are torch.float32" in wide
    logged = cli_here(
        "eval", str(checkpoint), *command[2:], "--tasks", "piqa,commonsense_qa", "--log-samples"
    )
    samples = checkpoint.with_name(f"eval_{checkpoint.name}_piqa+commonsense_qa_limit9_samples")
    assert f"saved {samples}/" in logged.stdout, logged.stderr
    rows = [json.loads(line) for line in (samples / "piqa.jsonl").read_text().splitlines()]
    assert len(rows) == 9
    assert {"doc", "arguments", "resps", "acc"} <= rows[0].keys()
    assert "Yaml" not in logged.stdout  # what lm-eval says of a task that states no version

    command = ["eval", str(checkpoint), *command[2:], "--out", str(out), "--log-samples"]
    several = ranks(2, "-m", "sparsellm", *command, "--tasks", "piqa,commonsense_qa")
    assert several.stdout.count(PARTIAL) == 1  # one rank speaks
    assert json.loads(out.read_text())["processes"] == 2
    alone = path.with_name(f"eval_{checkpoint.name}_piqa+commonsense_qa_limit9.json")
    _assert_same_scores(json.loads(out.read_text()), json.loads(alone.read_text()))
    for name, num_answers in (("piqa", 2), ("commonsense_qa", 5)):
        lines = (tmp_path / "two_samples" / f"{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["doc_id"] for row in rows] == list(range(9))
        assert [list(map(len, row["resps"])) for row in rows] == [[1] * num_answers] * 9


def _assert_same_scores(actual: dict, expected: dict) -> None:
    """Ranks add up in another order: standard errors agree to rounding, scores exactly."""
    for name, score in expected["tasks"].items():
        errors = {key: value for key, value in score.items() if key.endswith("stderr")}
        assert {**actual["tasks"][name], **errors} == score
        for key, value in errors.items():
            same = None if value is None else pytest.approx(value, rel=1e-12)
            assert actual["tasks"][name][key] == same
    assert actual["mean"] == expected["mean"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.long)])
def test_training_evaluates_and_is_not_disturbed(  # noqa: PLR0917
    tiny_overrides, cli_here, data_dir, tmp_path, number, request
):
    if number == 1:
        request.getfixturevalue("suite_of_two")
    overrides = [*tiny_overrides, "train.micro_batch_size=1", "validation.every_steps=0"]
    evaluation = ["evaluation.every_steps=3", f"evaluation.data_dir={data_dir}"]
    evaluation += ["evaluation.limit=5", "evaluation.batch_size=8"]

    def train(*further):
        program = ["train", "--recipe", "debug", *set_arguments([*overrides, *further])]
        if number == 1:
            cli_here(*program)
        else:
            ranks(number, "-m", "sparsellm", *program, config="fsdp2.yaml")

    train("name=with", *evaluation)
    train("name=without")
    runs = tmp_path / "runs"
    last = "checkpoints/step_00000004"
    evaluated, expected = (
        checkpoint.read_kind(runs / name / last, "model") for name in ("with", "without")
    )
    assert all(torch.equal(evaluated[name], value) for name, value in expected.items())
    records = read_metrics(runs / "with", "evaluation")
    assert [r["step"] for r in records] == [3, 4]
    # The record is what `sparsellm eval` makes of that step's checkpoint.
    loaded = load_pretrained(runs / "with" / last)
    scores = Evaluator(data_dir=data_dir, limit=5, batch_size=8).run(
        loaded.model, loaded.stock_tokenizer(split_special_tokens=True)
    )
    _assert_same_scores(records[-1], asdict(scores))
    assert scores.num_cut > scores.num_answers_cut > 0  # longer than a context of 32 bytes


def test_of_a_model_that_is_of_no_run_nothing_is_said_of_wandb(data_dir, tmp_path, cli_here):
    """Its recipe is that of 0.5b, whose runs log to wandb."""
    folder = write_chat_model(tmp_path / "theirs")
    command = ["eval", str(folder), "--data-dir", str(data_dir), "--tasks", "piqa", "--limit", "1"]
    assert "wandb" not in cli_here(*command, "--out", tmp_path / "scores.json").stdout
    import_export(folder, tmp_path / "run")
    printed = cli_here(command[0], tmp_path / "run", *command[2:]).stdout
    assert f"{tmp_path / 'run'} has no file wandb_id" in printed


@pytest.mark.long
def test_scores_go_to_the_wandb_run_of_the_training(tiny_overrides, data_dir, tmp_path):
    online = [*tiny_overrides, "logging.wandb=offline", "validation.every_steps=0"]
    online += ["evaluation.every_steps=4", f"evaluation.data_dir={data_dir}", "evaluation.limit=3"]
    command = ("-m", "sparsellm")
    python(*command, "train", "debug", *set_arguments(online))
    run = (tmp_path / "runs" / "debug").rename(tmp_path / "moved")
    score = (*command, "eval", run, "--data-dir", data_dir)
    python(*score, "--limit", "3")
    # Scores of fewer rows are not to be taken for those that have the same name.
    result = python(*score, "--tasks", "piqa", "--limit", "2")
    assert "run's scores have evaluation.limit 3, and these --limit 2" in result.stdout
    scores, run_ids = [], set()
    for record in _offline_records(run):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "evaluation/piqa/acc" in items:
                logged = {k: json.loads(v) for k, v in items.items() if not k.startswith("_")}
                logged.pop("sent/evaluation", None)  # training notes what wandb has
                scores.append(logged)
        elif record.WhichOneof("record_type") == "run":
            run_ids.add(record.run.run_id)
    assert run_ids == {(run / "wandb_id").read_text()}
    assert len(scores) == 2  # of training and of the command
    assert scores[0] == scores[1]
    assert scores[0]["tokens"] == 1024
    report = json.loads((run / "checkpoints" / "eval_step_00000004_limit3.json").read_text())
    assert scores[1]["evaluation/mean"] == report["mean"]
    assert scores[1]["evaluation/piqa/acc_norm"] == report["tasks"]["piqa"]["acc_norm"]


@pytest.fixture
def small_suite(tmp_path, monkeypatch, data_dir):
    """A copy of eval/ that a test may break, and a data directory likewise."""
    folder = tmp_path / "eval"
    shutil.copytree(bundled("eval"), folder)
    monkeypatch.setattr(suite_module, "bundled", lambda name: tmp_path / name)
    rows = tmp_path / "rows" / "piqa"
    rows.mkdir(parents=True)
    lines = (data_dir / "piqa" / "validation.jsonl").read_text().splitlines(True)
    (rows / "validation.jsonl").write_text("".join(lines[:20]))
    return folder, tmp_path / "rows"


def _build(rows: Path | None, *names: str) -> dict:
    return build_tasks(load_suite(), list(names), rows)


def test_a_broken_task_is_an_error_that_names_its_file(small_suite):
    folder, rows = small_suite
    assert list(_build(rows, "piqa")) == ["piqa"]
    path = folder / "tasks" / "piqa.yaml"
    whole = path.read_text()

    path.write_text(whole.replace("piqa/piqa.yaml", "piqa/piquant.yaml"))
    with pytest.raises(
        FileNotFoundError, match=r"piqa\.yaml: key 'include'.* no lm_eval/tasks/piq"
    ):
        _build(rows, "piqa")
    path.write_text(whole + "doc_to_text: '{{nothing.at.all}}'\n")
    with pytest.raises(ValueError, match=r"tasks/piqa\.yaml: lm-eval cannot build the task 'piqa'"):
        _build(rows, "piqa")
    path.write_text(whole + "class: nonsense\n")
    with pytest.raises(ValueError, match=r"tasks/piqa\.yaml: lm-eval cannot build the task 'piqa'"):
        _build(rows, "piqa")
    path.write_text(whole.replace("dataset_kwargs", "# "))
    with pytest.raises(
        ValueError, match=r"piqa\.yaml: --data-dir needs key 'dataset_kwargs\.data_f"
    ):
        _build(rows, "piqa")
    path.write_text("include: [\n")
    with pytest.raises(ValueError, match=r"tasks/piqa\.yaml: not valid YAML"):
        _build(rows, "piqa")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"piqa\.yaml is missing; .*suite\.yaml names"):
        _build(rows, "piqa")


def test_mistakes_in_the_suite_and_the_rows_name_the_key(small_suite):
    folder, rows = small_suite
    path = folder / "suite.yaml"
    whole = path.read_text()
    path.write_text(whole.replace("metric: acc", "metric: f1", 1))
    with pytest.raises(ValueError, match=r"suite\.yaml, line \d+: key 'tasks\.arc_easy\.metric'"):
        load_suite()
    path.write_text(whole.replace("piqa:\n    shots: 0", "piqa:\n    shots: 2"))
    with pytest.raises(ValueError, match=r"key 'tasks\.piqa\.shots'.*training_split"):
        _build(rows, "piqa")
    path.write_text(whole)
    with pytest.raises(FileNotFoundError, match=r"hellaswag/validation\.jsonl is missing.*--tasks"):
        _build(rows, "piqa", "hellaswag")
    file = rows / "piqa" / "validation.jsonl"
    good = file.read_text()
    for content, message in (
        ("", "has no rows"),
        ("\n\n", "has no rows"),
        (good + '{"goal": "x"', r"line 21 is damaged: not JSON"),
        ("[1, 2]\n", r"line 1: expected an object"),
        ('{"gaol": "x"}\n', r"'goal' is undefined: the rows .* have no such field"),
        ('{"goal": "x"}\n', r"piqa\.yaml: .*; the rows in .* need the fields that docs/exper"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            _build(rows, "piqa")
    file = rows / "hellaswag" / "validation.jsonl"
    file.parent.mkdir()
    file.write_text('{"ctx": "x"}\n')
    with pytest.raises(ValueError, match=r"KeyError: 'ctx_a': the rows .* have no such field"):
        _build(rows, "hellaswag")


def test_a_metric_that_the_task_lacks_is_refused(small_suite, data_dir):
    folder, _ = small_suite
    path = folder / "suite.yaml"
    path.write_text(
        path.read_text().replace(
            "winogrande:\n    shots: 0\n    metric: acc\n",
            "winogrande:\n    shots: 0\n    metric: acc_norm\n",
        )
    )
    with pytest.raises(
        ValueError, match=r"key 'tasks\.winogrande\.metric': .* no acc_norm; it has"
    ):
        _build(data_dir, "winogrande")


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(suite_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lm-eval>="):
        build_tasks(SUITE, ["piqa"], None)


def test_mistakes_at_the_command_line_are_one_line(cli_here, tmp_path, tiny_overrides, monkeypatch):
    arguments = ["train", "--recipe", "debug", *set_arguments(tiny_overrides)]
    cli_here(*arguments)
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)  # the hub is out of reach
    hub = cli_here("eval", str(tmp_path / "runs" / "debug"), "--tasks", "piqa", status=1)
    assert hub.stderr.count("error:") == 1
    assert "Without a network, give --data-dir DIR (to train: --set evaluation.data_" in hub.stderr


def test_scores_of_a_part_do_not_replace_those_of_the_whole():
    def name(names, limit=None, kernels="dense", dtype=None):
        options = argparse.Namespace(limit=limit, kernels=kernels, dtype=dtype)
        return _beside(Path("checkpoints/step_00000004"), SUITE, names, options).name

    assert name(NAMES) == "eval_step_00000004.json"
    assert name(NAMES, 1) == "eval_step_00000004_limit1.json"
    assert name(["winogrande", "piqa"]) == "eval_step_00000004_piqa+winogrande.json"
    assert name(["piqa"], 20) == "eval_step_00000004_piqa_limit20.json"
    assert name(NAMES, kernels="sparse") == "eval_step_00000004_sparse.json"
    assert name(NAMES, 9, "auto", "fp32") == "eval_step_00000004_limit9_auto_fp32.json"


ROWS = [
    {"question": "Which is a colour?", "choices": ["blue", "seven"], "answer": 0},
    {"question": "Which is a number?", "choices": ["blue", "seven"], "answer": 1},
    {"question": "Which is a fruit?", "choices": ["apple", "stone"], "answer": 0},
]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}} ",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "byte_perplexity"}],
}
WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match"}],
    "filter_list": [
        {"name": "strict", "filter": [{"function": "take_first"}]},
        {"name": "letters", "filter": [{"function": "lowercase"}, {"function": "take_first"}]},
    ],
}


@pytest.fixture
def task_files(tmp_path):
    """Writes lm-eval tasks of one's own, whose rows lie on disk, and a group of two."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}}
    source |= {"test_split": "test"}
    tasks = {"mine_choice": CHOICE, "mine_rolling": ROLLING, "mine_writing": WRITING}
    contents = {name: {"task": name} | source | changes for name, changes in tasks.items()}
    twice = [contents["mine_choice"] | {"task": f"mine_{half}"} for half in ("first", "second")]
    mean = [{"metric": "acc", "weight_by_size": True}]
    contents["mine_group"] = {"group": "mine_group", "task": twice, "aggregate_metric_list": mean}
    for name, content in contents.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return {name: str(tmp_path / f"{name}.yaml") for name in contents}


def test_tasks_of_ones_own_are_scored_and_recorded_as_the_suites(train, cli_here, task_files):
    run = train("validation.every_steps=0").path
    done = cli_here("eval", str(run), "--tasks", ",".join(task_files.values()))
    path = run / "checkpoints" / f"eval_step_00000004_{'+'.join(task_files)}.json"
    assert f"saved {path}" in done.stdout
    tasks = json.loads(path.read_text())["tasks"]
    assert json.loads(path.read_text())["data"] is None  # the rows are not the hub's
    assert tasks["mine_choice"]["num_rows"] == 3
    assert tasks["mine_choice"]["acc"] in {n / 3 for n in range(4)}
    assert "acc" not in tasks["mine_rolling"]
    assert 1 < tasks["mine_rolling"]["byte_perplexity"] < 1000
    assert {"exact_match (strict)", "exact_match (letters)"} <= tasks["mine_writing"].keys()
    halves = [tasks[f"mine_group::mine_{half}"]["acc"] for half in ("first", "second")]
    assert tasks["mine_group"]["acc"] == sum(halves) / 2
    assert tasks["mine_group"]["num_rows"] == 6
    assert "needs all 7 tasks" not in done.stdout  # no task of the suite was asked for
    [evaluation] = read_evaluations(run, read_metrics(run))
    assert evaluation.limit is None
    assert {("mine_rolling", "byte_perplexity"), ("mine_group", "acc")} <= evaluation.scores.keys()
    score = evaluation.scores["mine_writing", "exact_match (strict)"]
    assert score.stderr == tasks["mine_writing"]["exact_match_stderr (strict)"]


def test_a_template_is_compiled_once_and_lm_eval_is_left_as_it_was():
    with templates_compiled_once():
        first, again, other = (utils.env.from_string(text) for text in ("{{a}}", "{{a}}", "{{b}}"))
        assert first is again is not other
        assert utils.apply_template("{{a}}", {"a": "x"}) == "x"
        assert utils.apply_template("{{a}}", {"a": "y"}) == "y"
    assert utils.env.from_string("{{a}}") is not utils.env.from_string("{{a}}")


def test_an_unknown_task_says_what_was_meant():
    with pytest.raises(ValueError, match=r"'pika' is neither a task of the suite .*'piqa'"):
        Evaluator(names=["pika"])
    with pytest.raises(ValueError, match=r"'wikitex' is neither .* did you mean 'wikitext'"):
        Evaluator(names=["wikitex"])
    with pytest.raises(ValueError, match=r"--tasks: there is no file none\.yaml"):
        Evaluator(names=["none.yaml"])


def test_two_tasks_of_one_name_are_refused(task_files, tmp_path):
    """The scores of one would be taken for those of the other, or be lost."""
    path, copy = Path(task_files["mine_choice"]), tmp_path / "copy.yaml"
    copy.write_text(path.read_text())
    with pytest.raises(ValueError, match=r"copy\.yaml: another task is called 'mine_choice', too"):
        Evaluator(names=[str(path), str(copy)])
    copy.write_text(path.read_text().replace("mine_choice", "piqa"))
    with pytest.raises(ValueError, match=r"copy\.yaml: another task is called 'piqa', too"):
        Evaluator(names=[str(copy)])


def test_a_task_that_lm_eval_cannot_build_is_named(task_files, tmp_path):
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(ValueError, match=r"lm-eval cannot build '.*mine_choice\.yaml'"):
        Evaluator(names=[task_files["mine_choice"]])


def test_no_question_is_shown_with_its_answer(task_files):
    path = Path(task_files["mine_choice"])
    content = yaml.safe_load(path.read_text()) | {"num_fewshot": 1}

    def evaluator(**splits):
        path.write_text(yaml.safe_dump(content | splits))
        return Evaluator(names=[str(path)])

    for splits in ({}, {"test_split": None, "validation_split": "test", "fewshot_split": "test"}):
        with pytest.raises(ValueError, match=r"draws its 1 examples from 'test', the rows that"):
            evaluator(**splits)
    # lm-eval leaves the question itself out of its examples.
    for splits in ({"fewshot_split": "test"}, {"test_split": None, "validation_split": "test"}):
        [task] = evaluator(**splits).tasks.values()
        for row in task.eval_docs:
            prompt = task.fewshot_context(row, num_fewshot=1)
            assert prompt.count("Which is") == 2
            assert prompt.count(row["question"]) == 1
    examples = {"fewshot_config": {"samples": [ROWS[0] | {"question": "Which is a sea?"}]}}
    [task] = evaluator(**examples).tasks.values()
    assert task.fewshot_context(ROWS[0], num_fewshot=1).startswith("Which is a sea?")


@pytest.mark.parametrize("scored_is_source", [False, True])
def test_a_question_has_the_same_examples_on_any_ranks_and_every_time(tmp_path, scored_is_source):
    """And they are lm-eval's with one process, also if its row is drawn as an example of itself."""
    path = _task_with_examples(tmp_path, {"fewshot_split": "test"} if scored_is_source else {})
    [task] = TaskManager(include_defaults=False).load([path])["tasks"].values()

    def prompts(rank=0, num_ranks=1):
        task.build_all_requests(rank=rank, world_size=num_ranks)
        return {instance.doc_id: instance.args[0] for instance in task.instances}

    task.set_fewshot_seed(1234)  # as lm-eval's `simple_evaluate` does
    expected = prompts()
    assert expected.keys() == set(range(12))
    assert len(set(expected.values())) == 12
    for num_ranks in (1, 2, 5, 1):
        prompts_of_ranks = {}
        for rank in range(num_ranks):
            restart_examples(task, rank, num_ranks)
            prompts_of_ranks |= prompts(rank, num_ranks)
        assert prompts_of_ranks == expected


def test_every_evaluation_shows_the_same_examples(pair, tmp_path):
    model, tokenizer, _ = pair(torch.float32, 256)
    evaluator = Evaluator(names=[_task_with_examples(tmp_path, {})], log_samples=True)
    prompts = []
    for _ in range(2):
        evaluator.run(model, tokenizer)
        prompts.append([row["arguments"] for row in evaluator.samples["mine"]])
    assert len(prompts[0]) == 12
    assert prompts[0] == prompts[1]


def _task_with_examples(folder: Path, changes: dict[str, str]) -> str:
    """Writes a task of 12 questions, each with three examples from 12 training rows."""
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
    for split, path in files.items():
        rows = (ROWS[0] | {"question": f"Which {i} of {split}?"} for i in range(12))
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "num_fewshot": 3}
    source |= {"training_split": "train", "test_split": "test"}
    task = folder / "mine.yaml"
    task.write_text(yaml.safe_dump({"task": "mine"} | CHOICE | source | changes))
    return str(task)


def test_generated_text_is_that_of_the_stock_class(pair):
    ours, tokenizer, stock = pair(torch.float32, context_length=48)
    texts = ["Once upon a time", "A", "žluťoučký 🙂 kůň", "far too long " * 40]
    options = {"until": ["\n\n"], "max_gen_toks": 6}
    requests = [
        Instance("generate_until", {}, (text, options), index) for index, text in enumerate(texts)
    ]
    settings = {"batch_size": 4, "softmax_dtype": None}
    sparse_lm = SparseLM(ours, tokenizer, **settings)
    reference = HFLM(pretrained=str(stock), device="cpu", batch_size=4, dtype="float32")
    for one, other in zip(
        sparse_lm.tok_batch_encode(texts), reference.tok_batch_encode(texts), strict=True
    ):
        assert torch.equal(one, other)
    assert sparse_lm.generate_until(requests) == reference.generate_until(requests)
    assert (sparse_lm.num_requests, sparse_lm.num_cut) == (len(texts), 1)
    too_many = [Instance("generate_until", {}, ("A", {"max_new_tokens": 48}), 0)]
    with pytest.raises(ValueError, match=r"asks for 48 new tokens .* context has 48"):
        sparse_lm.generate_until(too_many)


def test_whole_texts_are_requests_of_as_many_windows_as_they_have(tiny):
    tokenizer = _tokenizer("bytes")
    model = build_model(tiny("model.context_length=16"), tokenizer.eos_token_id).eval()
    lm = SparseLM(model, tokenizer, batch_size=2, softmax_dtype=None)
    texts = ("1234567890" * 4, "another text")
    lm.loglikelihood_rolling([Instance("rolling", {}, (text,), i) for i, text in enumerate(texts)])
    assert (lm.num_requests, lm.num_cut) == (3 + 1, 0)


def test_table_stars_what_enters_the_mean():
    task_scores = {
        name: {"acc,none": 0.25, "acc_stderr,none": 0.03, "acc_norm,none": 0.5}
        | {"acc_norm_stderr,none": "N/A"}
        for name in NAMES
    }
    results = {
        "results": task_scores,
        "versions": dict.fromkeys(NAMES, 1.0),
        "n-shot": dict.fromkeys(NAMES, 0),
        "n-samples": {name: {"original": 9, "effective": 9} for name in NAMES},
    }
    scores = from_lm_eval(results, SUITE, num_requests=4, num_cut=0)
    assert scores.mean == pytest.approx(0.25)
    assert scores.mean_stderr == pytest.approx(0.03 / 7**0.5)
    lines = table(scores, SUITE).splitlines()
    assert len(lines) == 1 + len(NAMES) + 1
    assert max(map(len, lines)) < 100
    cut = table(from_lm_eval(results, SUITE, num_requests=4, num_cut=2, num_answers_cut=1), SUITE)
    assert cut.splitlines()[-1].startswith("1 of these have an answer that alone is longer: ")
    assert [line.count("*") for line in lines[1:-1]] == [1] * 7 + [0]
    assert "25.00 ± 3.00*" in next(line for line in lines if line.startswith("winogrande"))
