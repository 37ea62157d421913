"""Exported folders: what stock tools compute from them, and the way back."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TINY, checkpoint_of, set_arguments, train_recipe
from runs.hf_models import write_chat_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline

import sparsellm
from sparsellm.export import save_export
from sparsellm.export.card import metadata
from sparsellm.export.save_export import export, import_export
from sparsellm.recipe import load_recipe
from sparsellm.recipe.estimate import active_parameters
from sparsellm.runs import state
from sparsellm.runs.checkpoint import CheckpointError
from sparsellm.runs.huggingface.find import find_checkpoint, weights_id
from sparsellm.runs.huggingface.pretrained import load_pretrained
from sparsellm.runs.manifest import read_manifest, write_manifest
from sparsellm.training.resume.start_checks import check_run

VARIANTS = {
    "relu": [],
    "silu": ["ffn.activation=silu"],
    "non-gated": ["ffn.gated=false"],
    "non-gated relu2": ["ffn.activation=relu2", "ffn.gated=false"],
    "grouped heads, untied, other RoPE": [
        "model.num_key_value_heads=1",
        "model.tie_word_embeddings=false",
        "model.rope_theta=500000",
    ],
}


_CHECKPOINTS: dict[str, Path] = {}  # by the recipe, but for its folder


def _checkpoint(recipe):
    """A checkpoint after one step; of a recipe that has made one, a copy of it."""
    of_recipe = recipe.to_yaml().replace(str(recipe.run_path.parent), "")
    path = recipe.run_path / "checkpoints" / "step_00000001"
    if of_recipe in _CHECKPOINTS:
        shutil.copytree(_CHECKPOINTS[of_recipe], path)
    else:
        assert checkpoint_of(recipe) == path
        _CHECKPOINTS[of_recipe] = Path(tempfile.mkdtemp(), path.name)
        shutil.copytree(path, _CHECKPOINTS[of_recipe])
    return path


@pytest.fixture
def trained(tiny):
    """The checkpoint of the tiny recipe after one step."""
    return _checkpoint(tiny())


@pytest.fixture
def exported(trained, tmp_path):
    """It again, exported in fp32."""
    export(trained, tmp_path / "exported", "fp32")
    return tmp_path / "exported"


def _tokens(recipe, batch=3):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(257, (batch, recipe.model.context_length), generator=generator)


@torch.no_grad()
def _logits(model, tokens):
    return model(tokens).logits


def _files(folder):
    return sorted(path.name for path in folder.iterdir())


# --- the gate: stock tools take it ---------------------------------------------------------------


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_stock_logits_equal_the_training_models(tiny, tmp_path, overrides):
    recipe = tiny(*overrides)
    path = _checkpoint(recipe)
    tokens = _tokens(recipe)
    expected = _logits(load_pretrained(path).model, tokens)

    export(path, tmp_path / "fp32", "fp32")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype="auto")
    assert type(stock).__name__ == ("LlamaForCausalLM" if recipe.ffn.gated else "ArceeForCausalLM")
    assert stock.dtype == torch.float32
    assert torch.equal(_logits(stock, tokens), expected)

    export(path, tmp_path / "bf16")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert stock.dtype == torch.bfloat16
    logits = _logits(stock, tokens)
    # The same model in the same type has the same bits; RoPE's frequencies stay fp32 in both.
    ours = load_pretrained(path, dtype=torch.bfloat16).model
    torch.testing.assert_close(logits, _logits(ours, tokens), rtol=0, atol=0)
    # Against fp32: bf16 has 8 bits, and weights and each activation are rounded to them. Tolerance
    # is 2% of the logits' own spread.
    error = (logits.float() - expected).abs().max()
    assert error < 0.02 * (expected.max() - expected.min()), float(error)


def test_config_says_what_was_trained(tiny, tmp_path):
    path = _checkpoint(tiny(*VARIANTS["grouped heads, untied, other RoPE"]))
    export(path, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["hidden_act"] == "relu"
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500_000.0}
    assert config["rope_theta"] == 500_000.0  # for readers of transformers 4's files
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == "bfloat16"
    assert "auto_map" not in config  # no remote code
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 256
    assert generation["suppress_tokens"] == list(range(257, 320))


def test_pipeline_generates_from_it(exported):
    generator = pipeline("text-generation", str(exported))
    (result,) = generator("def ", max_new_tokens=8, do_sample=False)
    assert result["generated_text"].startswith("def ")
    prompts = ["def ", "import os, sys"]
    batch = generator(prompts, max_new_tokens=8, do_sample=False, batch_size=2)
    alone = [generator(prompt, max_new_tokens=8, do_sample=False)[0] for prompt in prompts]
    assert [generated["generated_text"] for (generated,) in batch] == [
        generated["generated_text"] for generated in alone
    ]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    ids = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=24)
    assert int(ids.max()) < len(tokenizer)


def test_an_accelerated_pipeline_generates_the_same(exported):
    generator = pipeline("text-generation", str(exported), dtype=torch.bfloat16)
    result = generator("def ", max_new_tokens=8, do_sample=False)
    assert len(sparsellm.accelerate(generator.model, kernels="sparse").accelerated) == 2
    assert generator("def ", max_new_tokens=8, do_sample=False) == result


def test_lm_evaluation_harness_takes_it(exported):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    pairs = [("def main", "():\n"), ("import", " os"), ("", "class")]
    model = HFLM(pretrained=str(exported), device="cpu", batch_size=2, dtype="float32")
    requests = [
        Instance("loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(pairs)
    ]
    ours = load_pretrained(exported)
    for (context, continuation), (likelihood, _) in zip(
        pairs, model.loglikelihood(requests, disable_tqdm=True), strict=True
    ):
        first, second = ours.tokenizer.encode_batch([context, continuation])
        before = first.tolist() or [ours.tokenizer.eot_id]
        tokens = torch.tensor([[*before, *second.tolist()]])
        log_probs = _logits(ours.model, tokens)[0, len(before) - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(1, tokens[0, len(before) :, None]).sum()
        assert likelihood == pytest.approx(float(expected), abs=1e-4)


def test_gpt2_recipe(tiny, gpt2_cache, tmp_path, cli_here):
    path = _checkpoint(tiny("data.tokenizer=gpt2", "model.vocab_multiple=128"))
    printed = cli_here("export", path, tmp_path / "out", "--dtype", "fp32").stdout
    assert "AutoTokenizer of transformers 5" not in printed
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("hello world")["input_ids"] == [31373, 995]
    assert tokenizer.eos_token_id == 50256
    assert load_pretrained(tmp_path / "out").tokenizer.name == "gpt2"
    (result,) = pipeline("text-generation", str(tmp_path / "out"))("hello", max_new_tokens=2)
    assert result["generated_text"].startswith("hello")


def test_a_tokenizer_that_transformers_replaces_is_named(tiny, gpt2_cache, tmp_path, cli_here):
    """If this fails because the ids are equal, transformers reads the folder's tokenizer again."""
    path = _checkpoint(tiny("data.tokenizer=gpt2", "model.family=qwen2"))
    printed = cli_here("export", path, tmp_path / "out").stdout
    assert "AutoTokenizer of transformers 5 rebuilds such a tokenizer" in printed
    assert "**AutoTokenizer** of transformers 5" in (tmp_path / "out" / "README.md").read_text()
    text = "3,141  59\n"
    (expected,) = load_pretrained(path).tokenizer.encode_batch([text])
    replaced = AutoTokenizer.from_pretrained(tmp_path / "out")(text).input_ids
    assert replaced != expected.tolist()
    fast_tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    for tokenizer in (fast_tokenizer, sparsellm.load(tmp_path / "out").tokenizer):
        assert tokenizer(text).input_ids == expected.tolist()


def test_a_tokenizer_of_hugging_faces_goes_with_the_export(tiny, tmp_path):
    folder = write_chat_model(tmp_path / "theirs")
    path = _checkpoint(tiny(f"data.tokenizer=hf:{folder}"))
    export(path, tmp_path / "out", "fp32")
    shutil.rmtree(folder)
    (tmp_path / "out").rename(tmp_path / "moved")

    stock = AutoTokenizer.from_pretrained(tmp_path / "moved")
    ours = load_pretrained(tmp_path / "moved").tokenizer
    assert stock("a cat")["input_ids"] == ours.encode_batch(["a cat"])[0].tolist()
    assert stock.eos_token_id == ours.eot_id == 1
    import_export(tmp_path / "moved", tmp_path / "run")
    assert load_pretrained(tmp_path / "run").tokenizer.identity == ours.identity


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["runs", "/tmp/alice/runs"])
def test_paths_that_a_published_export_would_tell_are_named(folder, monkeypatch):
    recipe = load_recipe("debug", [f"logging.run_dir={folder}"])
    monkeypatch.setattr(save_export, "load_recipe_of", lambda _: recipe)
    monkeypatch.setattr(save_export, "auto_tokenizer_agrees", lambda _: True)
    notes = save_export.export_notes(recipe.run_path, recipe.run_path)
    expected = "sparsellm_recipe.yaml and README.md name places on this machine, such as /tmp/alice"
    assert [expected in note for note in notes] == [True] * folder.startswith("/")


def test_shards_hold_the_same_tensors(trained, tmp_path):
    export(trained, tmp_path / "one", "fp32")
    export(trained, tmp_path / "many", "fp32", max_shard_size="40KB")
    shards = list((tmp_path / "many").glob("model-*.safetensors"))
    assert len(shards) > 2
    together = {k: v for shard in shards for k, v in load_file(shard).items()}
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert together.keys() == whole.keys() == load_file(trained / "model.safetensors").keys()
    one, sharded = load_pretrained(tmp_path / "one").model, load_pretrained(tmp_path / "many").model
    for a, b in zip(one.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_card_tells_the_run(tiny, tmp_path):
    recipe = tiny()
    path = train_recipe(recipe)
    scores = {"tasks": {"piqa": {"acc": 0.75, "acc_stderr": 0.0125}}}
    (path / "eval_quick.json").write_text(json.dumps(scores))
    (recipe.run_path / "eval_old.json").write_text(json.dumps({"step": 1, **scores}))
    export(recipe.run_path, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    records = [json.loads(line) for line in (recipe.run_path / "metrics.jsonl").open()]
    last_train, validation = (
        [record for record in records if record["kind"] == kind][-1]
        for kind in ("train", "validation")
    )
    assert f"| training loss at step 4 | {last_train['loss']:.4f} nats |" in card
    assert f"| validation loss at step 4 | {validation['loss']:.4f} nats (512 tokens) |" in card
    assert "| tokens | 1,024 |" in card
    active = active_parameters(recipe, sum(last_train["sparsity"]["nnz_mean"]) / 2)
    assert f" parameters ({active:,} active for a token) in " in card
    assert f"| 1 | {last_train['sparsity']['nnz_mean'][1]:.1f} |" in card
    assert card.count("| piqa | acc | 75.00 ± 1.25 |") == 1
    assert "llama.cpp** ignores `hidden_act`" in card
    assert "--model-impl transformers" in card
    assert recipe.to_yaml() in card


def test_card_tells_the_coefficient_that_a_target_led_to(tiny, tmp_path):
    recipe = tiny("sparsity.target_nnz=5")
    train_recipe(recipe)
    records = [json.loads(line) for line in (recipe.run_path / "metrics.jsonl").open()]
    last = [record for record in records if record["kind"] == "train"][-1]["l1_coefficient"]
    assert last != recipe.sparsity.l1_coefficient
    export(recipe.run_path, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    movement = f"moved from {recipe.sparsity.l1_coefficient:g} towards 5 non-zeros per token"
    assert f"(on Σ over neurons) | {last:.3g} at step 4, {movement} |" in card


def _head_of_card(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def test_the_card_has_the_hubs_metadata(tiny, tmp_path):
    path = _checkpoint(tiny())
    score = {"acc": 0.25, "acc_stderr": 0.01, "acc_norm": 0.5, "num_rows": 9, "num_rows_total": 9}
    line = {"kind": "evaluation", "step": 1, "tokens": 256, "mean": None, "mean_stderr": None}
    metrics = path.parent.parent / "metrics.jsonl"
    metrics.write_text(json.dumps(line | {"tasks": {"piqa": score}}) + "\n")
    export(path, tmp_path / "out", license_name="apache-2.0")
    head = _head_of_card(tmp_path / "out")
    assert head["license"] == "apache-2.0"
    assert head["tags"] == ["sparsellm", "activation-sparsity", "relu"]
    [index] = head["model-index"]
    [result] = index["results"]
    assert result["dataset"]["type"] == "baber/piqa"
    assert result["dataset"]["name"] == "piqa"
    values = {metric["name"]: metric["value"] for metric in result["metrics"]}
    assert values == {"acc": 25.0, "acc_norm": 50.0}
    assert "2603.23198" in (tmp_path / "out" / "README.md").read_text()
    metrics.write_text(json.dumps(line | {"tasks": {"piqa": score | {"num_rows": 3}}}) + "\n")
    export(path, tmp_path / "limited")
    assert not {"model-index", "license"} & _head_of_card(tmp_path / "limited").keys()


def test_a_dense_export_is_not_called_sparse(tiny, tmp_path):
    export(_checkpoint(tiny("ffn.activation=silu")), tmp_path / "out")
    assert _head_of_card(tmp_path / "out")["tags"] == ["sparsellm", "silu"]
    assert "Citation" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["ffn.activation=silu"], False),
        (["ffn.activation=relu2"], True),
        (["ffn.activation=relu2", "ffn.gated=false"], False),  # as Arcee's own models
        (["ffn.activation=relu", "ffn.gated=false"], True),
    ],
)
def test_the_card_warns_where_others_compute_another_activation(tiny, tmp_path, overrides, warned):
    export(_checkpoint(tiny(*overrides)), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("llama.cpp** ignores `hidden_act`" in card) == warned


@pytest.mark.parametrize(
    ("corpus", "datasets"),
    [
        ("fineweb", ["HuggingFaceFW/fineweb"]),
        (
            {"fineweb": 3, "fineweb-edu": 1},
            ["HuggingFaceFW/fineweb", "HuggingFaceTB/smollm-corpus"],
        ),
        ("sample", None),
        ("gone.yaml", None),
    ],
)
def test_the_card_names_the_data(tiny, corpus, datasets):
    recipe = tiny()
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"corpus": corpus})})
    head = yaml.safe_load(metadata(recipe, None, None))
    assert head.get("datasets") == datasets
    assert head.get("language") == (["en"] if datasets else None)


@pytest.mark.parametrize(("multiple", "padded"), [(64, True), (1, False)])
def test_the_card_tells_of_a_padded_embedding(tiny, tmp_path, multiple, padded):
    export(_checkpoint(tiny(f"model.vocab_multiple={multiple}")), tmp_path / "out", "bf16")
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("padded beyond the tokenizer's vocabulary" in card) == padded


def test_card_without_a_run_says_so(trained, tmp_path):
    (trained.parent.parent / "metrics.jsonl").unlink(missing_ok=True)
    export(trained, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "unknown: no metrics.jsonl beside the checkpoint" in card
    assert "Unknown: no evaluation of step 1 was found." in card


def test_a_card_without_records_has_the_checkpoints_own_statistics(tiny, tmp_path):
    path = _checkpoint(tiny("sparsity.dead_window_tokens=256"))
    (path.parent.parent / "metrics.jsonl").unlink(missing_ok=True)
    stats = load_file(path / "stats.safetensors")
    tokens, mean = (
        stats["activity_tokens"],
        stats["activity_LN"][0].sum() / stats["activity_tokens"],
    )
    dead = (stats["activity_LN"][0] == 0).double().mean()  # of the one step, which is the window
    export(path, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Over {tokens:,} tokens, the last complete window.\n" in card
    assert f"| 0 | {mean:.1f} | {mean / 64:.2%} | {dead:.1%} |" in card


def test_card_has_the_scores_of_its_own_step(trained, test_data, tmp_path, cli_here):
    run_path = trained.parent.parent
    card = tmp_path / "out" / "README.md"

    def exported():
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        export(trained, tmp_path / "out")
        return card.read_text()

    logged = {"kind": "evaluation", "step": 1, "tokens": 256, "mean": 0.5, "mean_stderr": None}
    score = {"acc": 0.25, "acc_stderr": 0.01, "num_rows": 3, "num_rows_total": 500}
    other = logged | {"step": 0, "tasks": {"boolq": score}}
    lines = (json.dumps(line) + "\n" for line in (other, logged | {"tasks": {"sciq": score}}))
    (run_path / "metrics.jsonl").write_text("".join(lines))
    assert "| sciq | acc | 25.00 ± 1.00 |" in exported()
    assert "| mean of the suite |  | 50.00 |" in exported()
    assert "Only the first 3 rows of each task, not a result to report." in exported()
    assert "boolq" not in exported()

    command = ["eval", str(trained), "--data-dir", str(test_data / "eval"), "--tasks", "piqa"]
    (row,) = (
        line
        for line in cli_here(*command, "--limit", "4").stdout.splitlines()
        if line.startswith("piqa")
    )
    assert f"| piqa | acc | {row.split('  ')[-2].strip()} |" in exported()
    assert "Only the first 4 rows of each task, not a result to report." in exported()


def test_a_folder_with_files_is_not_touched(trained, tmp_path):
    (tmp_path / "out").mkdir()
    export(trained, tmp_path / "out")  # an empty one is taken
    before = _files(tmp_path / "out")
    with pytest.raises(ValueError, match=r"out exists and is not empty; give a new folder"):
        export(trained, tmp_path / "out")
    assert _files(tmp_path / "out") == before


@pytest.mark.parametrize("command", [("export", "--drop-dead"), ("import",)])
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(exported, command, error_of):
    line = error_of(*command, exported, exported / "config.json" / "out")
    assert "config.json is not a folder); name another folder:" in line


def _full(*_):
    raise OSError(28, "No space left on device")


def test_a_failed_export_leaves_nothing(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsellm.export.save_export.write_tokenizer", _full)
    before = _files(tmp_path)
    with pytest.raises(CheckpointError, match=r"out was not written: .*No space left"):
        export(trained, tmp_path / "out")
    assert _files(tmp_path) == before


def test_a_failed_import_leaves_nothing(exported, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsellm.runs.saver._write_files", _full)
    with pytest.raises(CheckpointError, match=r"was not written: .*No space left"):
        import_export(exported, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- and back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_export_then_import_is_the_identity(tiny, tmp_path, overrides):
    path = _checkpoint(tiny(*overrides))
    export(path, tmp_path / "out", "fp32")
    written, stored = import_export(tmp_path / "out", tmp_path / "run")
    assert stored == "float32"
    assert find_checkpoint(tmp_path / "run") == written
    assert written.name == path.name
    original, back = (load_file(p / "model.safetensors") for p in (path, written))
    assert original.keys() == back.keys()
    assert all(torch.equal(original[name], back[name]) for name in original)
    assert (written / "recipe.yaml").read_bytes() == (path / "recipe.yaml").read_bytes()
    export(tmp_path / "run", tmp_path / "again", "fp32")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "sparsellm_recipe.yaml"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_an_exported_folder_is_exported_again(exported, tmp_path):
    export(exported, tmp_path / "again", "fp32")
    assert _files(tmp_path / "again") == _files(exported)
    for name in ("model.safetensors", "config.json", "sparsellm_recipe.yaml"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes()
    card = (tmp_path / "again" / "README.md").read_text()
    assert "Unknown: no metrics.jsonl beside the checkpoint, and no complete window" in card


def test_an_export_that_was_changed_since_is_read_without_its_recipe(exported, error_of, cli_here):
    """As after training it elsewhere, with further tokens."""
    model, tokenizer = (c.from_pretrained(exported) for c in (AutoModelForCausalLM, AutoTokenizer))
    command = ["generate", str(exported), "--prompt", "a", "--max-new-tokens", "2"]
    remedy = "if the model was changed after its export, delete sparsellm_recipe.yaml there"
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(exported)
    stderr = error_of(*command)
    assert "is not the recipe's tokenizer 'bytes'" in stderr
    assert remedy in stderr
    model.resize_token_embeddings(330)
    model.save_pretrained(exported)
    assert f"vocab_size is 330 and the recipe's model has 320; {remedy}" in error_of(*command)
    (exported / "sparsellm_recipe.yaml").unlink()
    cli_here(*command)
    loaded = load_pretrained(exported)
    tokens = _tokens(loaded.recipe)[:, :32]
    assert torch.equal(_logits(loaded.model, tokens), _logits(model, tokens))


def test_what_a_user_adds_to_an_exports_tokenizer_stays(exported, tmp_path):
    """A chat template, say; the ids that it gives are those of training."""
    (exported / "chat_template.jinja").write_text("{{ messages[0].content }}")
    file = exported / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "right"}))
    again, back, run = (tmp_path / name for name in ("again", "back", "run"))
    export(exported, again)
    import_export(exported, run)
    export(run, back)
    read = [AutoTokenizer.from_pretrained(folder) for folder in (exported, again, back)]
    read += [sparsellm.load(path).tokenizer for path in (exported, run)]
    for tokenizer in read:
        assert tokenizer.chat_template == "{{ messages[0].content }}"
        assert tokenizer.padding_side == "right"
        assert tokenizer("a<|endoftext|>").input_ids == [97, 256]
    for path in (exported, run):
        scored = load_pretrained(path).stock_tokenizer(split_special_tokens=True)
        assert scored("a<|").input_ids == [97, 60, 124]
        assert len(scored("a<|endoftext|>").input_ids) == 14


def test_a_chat_template_of_an_export_goes_with_what_is_trained_from_it(tiny, exported, tmp_path):
    (exported / "chat_template.jinja").write_text("{{ messages[0].content }}")
    recipe = tiny("name=further", "train.steps=1")
    train_recipe(recipe, init_from=exported)
    shutil.rmtree(exported)
    train_recipe(tiny("name=further", "train.steps=2"))
    assert find_checkpoint(recipe.run_path).name == "step_00000002"
    export(recipe.run_path, tmp_path / "out")
    for tokenizer in (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        sparsellm.load(recipe.run_path).tokenizer,
    ):
        assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_bf16_is_widened_and_says_so(trained, tmp_path, cli_here):
    cli_here("export", trained, tmp_path / "out")
    printed = cli_here("import", tmp_path / "out", tmp_path / "run").stdout
    assert " (fp32, read from bfloat16; no optimizer state)\n" in printed
    for name, tensor in load_file(find_checkpoint(tmp_path / "run") / "model.safetensors").items():
        expected = load_file(trained / "model.safetensors")[name].bfloat16().float()
        assert torch.equal(tensor, expected)


def test_an_exported_folder_is_a_checkpoint_to_read(trained, exported):
    ours, theirs = load_pretrained(trained), load_pretrained(exported)
    assert theirs.path == exported == find_checkpoint(exported)
    assert theirs.recipe == ours.recipe
    assert theirs.trainer == ours.trainer
    weights = state.gather_model(theirs.model)
    for name, tensor in state.gather_model(ours.model).items():
        assert torch.equal(weights[name], tensor)


def test_a_folder_without_our_recipe_may_be_given_one(exported, tmp_path, tiny):
    (exported / "sparsellm_recipe.yaml").unlink()
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(tiny("name=mine").to_yaml())
    written, _ = import_export(exported, tmp_path / "run", str(recipe))
    assert load_pretrained(written).recipe == tiny("name=mine")


def test_training_starts_from_it_at_step_0(tiny, trained, exported, tmp_path):
    imported, _ = import_export(exported, tmp_path / "imported")
    outcomes = []
    for name, source in (("a", trained), ("b", exported), ("c", imported)):
        train_recipe(tiny(f"name={name}", "train.steps=2"), init_from=source)
        checkpoint_path = find_checkpoint(tmp_path / "runs" / name)
        outcomes.append(load_file(checkpoint_path / "model.safetensors"))
    train_recipe(tiny("name=d", "train.steps=2"))
    fresh = load_file(find_checkpoint(tmp_path / "runs" / "d") / "model.safetensors")
    first, *other_outcomes = outcomes
    for name, tensor in first.items():
        assert all(torch.equal(tensor, other[name]) for other in other_outcomes), name
    assert any(not torch.equal(tensor, fresh[name]) for name, tensor in first.items())


def test_init_from_is_for_the_first_start_alone(tiny, exported, capsys):
    # The run of `trained`: it has a checkpoint.
    train_recipe(tiny("train.steps=2"), init_from=exported)
    assert "resuming from" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"exported: .* has shape .* train a recipe of the same"):
        train_recipe(tiny("name=other", "model.intermediate_size=96"), init_from=exported)


def test_a_run_with_a_checkpoint_resumes_without_what_it_began_with(
    tiny_overrides, trained, tmp_path, error_of, cli_here
):
    weights = shutil.copytree(trained, tmp_path / "weights")
    overrides = [o for o in tiny_overrides if not o.startswith("model.") or "context" in o]
    words = set_arguments([*overrides, "name=new", "train.steps=2"])
    command = ["train", "debug", *words, "--init-from", str(weights)]
    cli_here(*command)
    shutil.rmtree(weights)
    resumed = cli_here(*command, "--set", "train.steps=3").stdout
    assert "step_00000002" in resumed
    assert "is not used" not in resumed  # they are gone, and need not be there
    other = shutil.copytree(trained, tmp_path / "weights")
    printed = cli_here(*command, "--set", "train.steps=4").stdout
    assert "is not used" not in printed  # these are the weights that it began with
    manifest = read_manifest(other)
    write_manifest(other, manifest.model_copy(update={"id": "another"}))
    printed = cli_here(*command, "--set", "train.steps=5").stdout
    note = (
        f"warning: --init-from {weights} is not used: this run resumes, and its first weights were "
        "those of debug (step 1). To begin with the given ones, use another name"
    )
    assert note in printed
    shutil.rmtree(other)
    recipe = load_pretrained(tmp_path / "runs" / "new").recipe
    assert recipe.model == load_recipe("debug", tiny_overrides).model  # that of the weights
    assert "is not a checkpoint" in error_of(*command, "--fresh")
    assert "is not a checkpoint" in error_of(*command, "--set", "name=another")


def test_a_run_that_began_with_random_weights_says_so_though_the_given_ones_are_missing(
    tiny, trained, tmp_path
):
    _, notes = check_run(tiny("train.steps=2"), None, tmp_path / "misspelt", fresh=False)
    assert f"--init-from {tmp_path / 'misspelt'} is not used" in notes[0]
    assert "its first weights were random ones" in notes[0]


def test_another_activation_on_the_same_weights_is_said(tiny, exported, capsys, tmp_path):
    train_recipe(tiny("name=silu", "train.steps=2", "ffn.activation=silu"), init_from=exported)
    out = capsys.readouterr().out
    assert f"weights of {exported}; the optimizer and the data begin at step 0" in out
    assert "changed since the checkpoint: ffn.activation relu → silu" in out
    assert "changed since the checkpoint: name" not in out
    # Resumed: it still knows.
    train_recipe(tiny("name=silu", "train.steps=4", "ffn.activation=silu"))
    path = find_checkpoint(tmp_path / "runs" / "silu")
    origin = load_pretrained(path).trainer["init_from"]
    assert origin == {
        "name": "debug",
        "step": 1,
        "tokens": 256,
        "path": str(exported),
        "id": weights_id(exported),
    }
    export(path, tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert "| initial weights | `debug` after 256 tokens, not counted above |" in card


def test_fresh_does_not_move_what_it_begins_with(tiny_overrides, trained, error_of):
    settings = set_arguments(tiny_overrides)
    line = error_of("train", "debug", *settings, "--fresh", "--init-from", trained)
    assert "--fresh would move --init-from" in line
    assert trained.is_dir()


def test_an_exported_folder_is_not_resumed(tiny, exported):
    with pytest.raises(ValueError, match=r"exported: it has only weights.* --init-from"):
        train_recipe(tiny("name=back"), resume_from=exported)


def test_an_imported_checkpoint_is_not_resumed(tiny, exported, tmp_path):
    recipe = tiny("name=back")
    import_export(exported, recipe.run_path)
    with pytest.raises(ValueError, match=r"no optimizer state .* --set name=NEW --init-from"):
        train_recipe(recipe)


# --- mistakes ------------------------------------------------------------------------------------


def test_a_truncated_or_missing_shard(trained, tmp_path, error_of):
    export(trained, tmp_path / "out", "fp32", max_shard_size="40KB")
    shard = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    line = error_of("import", tmp_path / "out", tmp_path / "run")
    assert f"{shard} is truncated or damaged" in line
    assert "export the checkpoint again" in line
    shard.unlink()
    line = error_of("import", tmp_path / "out", tmp_path / "run")
    assert f"{shard} is missing; export the checkpoint again" in line
    assert "(model.safetensors.index.json names it)" in line
    shutil.copy(sorted((tmp_path / "out").glob("model-*.safetensors"))[0], shard)
    line = error_of("import", tmp_path / "out", tmp_path / "run")
    assert f"{shard} and model.safetensors.index.json differ, such as" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.intermediate_size=96", "intermediate_size is 64"),
        ("ffn.activation=silu", "hidden_act is 'relu'"),
        ("ffn.gated=false", "model_type is 'llama'"),
        ("model.rope_theta=500000", "rope_parameters is"),
    ],
)
def test_a_recipe_of_another_model(exported, tmp_path, tiny, override, key):
    recipe = tmp_path / "other.yaml"
    recipe.write_text(tiny(override).to_yaml())
    with pytest.raises(
        ValueError, match=rf"config\.json: {key}.* give the recipe that the weights"
    ):
        import_export(exported, tmp_path / "run", str(recipe))


def test_a_damaged_config(exported, tmp_path, error_of):
    path = exported / "config.json"
    whole = path.read_text()
    for text, reason in (
        (whole[:40], "is damaged: not JSON"),
        ("{}", "cannot be read"),
        (whole.replace('"llama"', '"nothing"'), "cannot be read"),
    ):
        path.write_text(text)
        line = error_of("import", exported, tmp_path / "run")
        assert f"config.json {reason}" in line
        assert "export the checkpoint again" in line


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"rms_norm_eps": "x"},
        {"intermediate_size": [1]},
        {"vocab_size": None},
        {"head_dim": 7},
        {"rope_parameters": 3},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=str,
)
def test_a_config_with_an_impossible_value_is_refused(exported, tmp_path, change, error_of):
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | change))
    error = error_of("import", exported, tmp_path / "run")
    assert f"{exported / 'config.json'}" in error
    assert next(iter(change)) in error or "modulo by zero" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda w: w.index_fill(0, torch.tensor([1]), torch.nan), "has NaN or infinite values"),
        (lambda w: w.index_fill(0, torch.tensor([1]), -torch.inf), "has NaN or infinite values"),
        (lambda w: w.long(), "is of type int64; weights must be of float32, bfloat16"),
        (lambda w: w.bool(), "is of type bool"),
        (lambda w: w.to(torch.complex64), "is of type complex64"),
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused_by_name(exported, error_of, spoil, reason):
    weights, name = load_file(exported / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    save_file(
        weights | {name: spoil(weights[name])}, exported / "model.safetensors", {"format": "pt"}
    )
    run = exported.with_name("new")
    arguments = set_arguments([*TINY, f"logging.run_dir={run.parent}", "name=new"])
    for command in (
        ["import", str(exported), str(run)],
        ["generate", str(exported), "--prompt", "def "],
        ["train", "--recipe", "debug", "--init-from", str(exported), *arguments],
    ):
        assert f"{exported}: {name} {reason}" in error_of(*command)
        assert not run.exists()


@pytest.mark.parametrize("place", ["../w.safetensors", "/w.safetensors", "..", ""])
def test_an_index_that_leads_out_of_the_folder_is_refused(exported, tmp_path, place, error_of):
    (exported / "model.safetensors").rename(exported.parent / "w.safetensors")
    names = load_file(exported.parent / "w.safetensors")
    place = place.replace("/w", f"{exported.parent}/w") if place.startswith("/") else place
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, place)}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    error = error_of("import", exported, tmp_path / "run")
    assert f"the shard {place!r} is not in the folder" in error


def test_weights_of_another_model(exported, tiny, tmp_path, error_of):
    other = _checkpoint(tiny("name=wide", "model.intermediate_size=96"))
    shutil.copy(other / "model.safetensors", exported / "model.safetensors")
    line = error_of("import", exported, tmp_path / "run")
    assert f"{exported}: model.layers.0.mlp.gate_proj.weight has shape (96, 32)" in line


def test_another_tokenizer(exported, gpt2_cache, tmp_path, error_of):
    from sparsellm.runs.huggingface.hf_tokenizer import write_tokenizer

    write_tokenizer("gpt2", exported, context_length=32)
    line = error_of("import", exported, tmp_path / "run")
    assert "tokenizer.json (50,257 ids" in line
    assert "is not the recipe's tokenizer 'bytes'" in line


def test_importing_a_folder_with_code_of_its_own_neither_asks_nor_runs_it(
    exported, tmp_path, monkeypatch, cli_here
):
    config = json.loads((exported / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (exported / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (exported / "own.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    cli_here("import", exported, tmp_path / "imported")
    assert not ran.exists()
    weights = load_pretrained(tmp_path / "imported").model.state_dict()
    assert all(
        torch.equal(weights[name], w)
        for name, w in load_pretrained(exported).model.state_dict().items()
    )


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_all_files_have_the_modes_of_new_files(tiny, tmp_path, mask):
    """safetensors makes files that only their owner can read."""
    before = os.umask(mask)
    try:
        path = checkpoint_of(tiny())
        export(path, tmp_path / "exported")
    finally:
        os.umask(before)
    files = [*path.iterdir(), path.parent / "latest", *(tmp_path / "exported").iterdir()]
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in files}
    assert set(modes.values()) == {oct(0o666 & ~mask)}, modes


def test_what_users_wrote_is_escaped_in_the_card(tiny, tmp_path):
    recipe = tiny("description=a | b <script>alert(1)</script> [x](y) `z`\n# title")
    path = _checkpoint(recipe)
    scores = {"tasks": {"my|task<b>": {"acc": 0.5}}}
    (path / "eval_own.json").write_text(json.dumps(scores))
    export(path, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    text = card.split("```")[0]  # the recipe itself stands in a block of code further down
    assert "<script>" not in text
    assert "[x](y)" not in text
    assert "\n# title" not in text
    assert "my\\|task&lt;b>" in card
