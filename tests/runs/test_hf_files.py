"""What a Hugging Face folder holds besides weights goes through import, training and export."""

import json
import shutil

import pytest
import tokenizers
import torch
from conftest import checkpoint_of, set_arguments, train_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import sparsellm
from runs.hf_models import short_text, write_chat_model
from sparsellm.export.save_export import export, import_export
from sparsellm.runs.huggingface.pretrained import find_checkpoint, load_pretrained

TEXT = "Document 1. In 2024 <|im_end|>"
MESSAGES = [{"role": "user", "content": "why?"}]


@pytest.fixture
def tiny_overrides(tiny_overrides, tmp_path):
    return [*tiny_overrides, *short_text(tmp_path)]


@pytest.fixture
def folder(tmp_path):
    return write_chat_model(tmp_path / "theirs")


def _settings(model, tokenizer):
    """All that a user sees of them, beside the weights."""
    generation = model.generation_config.to_diff_dict()
    return {
        "ids": tokenizer(TEXT).input_ids,
        "special tokens": tokenizer.special_tokens_map,
        "further special tokens": tokenizer.extra_special_tokens,
        "template": tokenizer.apply_chat_template(MESSAGES, tokenize=False),
        "length": tokenizer.model_max_length,
        "generation": {k: v for k, v in generation.items() if k != "suppress_tokens"},
        **{name: getattr(model.config, f"{name}_token_id") for name in ("bos", "eos", "pad")},
    }


def _stock(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return _settings(model, AutoTokenizer.from_pretrained(folder))


def test_a_model_from_elsewhere_keeps_its_tokens_template_and_defaults(folder, tmp_path, cli_here):
    expected = _stock(folder)
    assert (expected["ids"][0], expected["eos"]) == (0, [1, 2])
    assert expected["template"] == "<bos>why?<|im_end|>"
    printed = cli_here("import", folder, tmp_path / "run").stdout
    assert f"left behind in {folder}: USAGE.md\n" in printed
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.rename(tmp_path / "moved")  # nothing below reads it
    run, direct, again = (tmp_path / name for name in ("run", "direct", "again"))
    assert _settings(*sparsellm.load(run)) == expected
    export(tmp_path / "moved", direct, "fp32")
    export(run, again, "fp32")
    import_export(again, tmp_path / "back")
    export(tmp_path / "back", tmp_path / "thrice", "fp32")
    for exported in (direct, again, tmp_path / "thrice"):
        assert _stock(exported) == expected == _settings(*sparsellm.load(exported))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (exported / name).read_bytes() == files[name]
        for name in ("generation_config.json", "LICENSE"):
            assert (exported / name).read_bytes() == files[name]
        card = (exported / "README.md").read_text()
        assert "was ordinary text in" not in card


def test_a_recipe_of_ones_own_changes_nothing_of_it(folder, tmp_path, tiny):
    import_export(folder, tmp_path / "derived")
    recipe = load_pretrained(tmp_path / "derived").recipe
    mine = tmp_path / "mine.yaml"
    mine.write_text(recipe.model_copy(update={"name": "mine"}).to_yaml())
    import_export(folder, tmp_path / "run", str(mine))
    assert _settings(*sparsellm.load(tmp_path / "run")) == _stock(folder)


def test_generation_from_elsewhere_ends_at_each_of_its_tokens(folder, tmp_path):
    import_export(folder, tmp_path / "run")
    model = load_pretrained(tmp_path / "run").model
    with torch.no_grad():
        model.lm_head.weight[2] = 100 * model.model.norm.weight
        model.lm_head.weight[3:] = -model.lm_head.weight[2]
    out = model.generate(torch.tensor([[0, 90]]), max_new_tokens=9, do_sample=False)
    assert 1 <= out.shape[1] - 2 < 9
    assert out[0, -1] in (1, 2)


def test_training_here_goes_on_with_its_tokens_and_says_what_it_leaves(
    folder, tiny_overrides, tmp_path, cli_here
):
    """Texts follow the end-of-document token then, as in training; the rest stays."""
    overrides = [o for o in tiny_overrides if not o.startswith("model.") or "context" in o]
    command = ["train", "debug", *set_arguments([*overrides, "train.steps=1"])]
    cli_here(*command, "--init-from", folder)
    run = tmp_path / "runs" / "debug"
    assert f"hf:{folder}" in (run / "recipe.yaml").read_text()
    shutil.rmtree(folder)  # resumed and exported without it
    cli_here(*command, "--init-from", folder, "--set", "train.steps=2")
    printed = cli_here("export", run, tmp_path / "out", "--dtype", "fp32").stdout
    assert "a post-processor that makes <bos> … of a text" in printed
    stock = _stock(tmp_path / "out")
    assert stock["ids"][0] != 0
    assert stock["ids"][-1] == 2
    names = {"bos_token": "<eos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    assert stock["special tokens"] == names
    assert stock["template"] == "<eos>why?<|im_end|>"
    generation = stock["generation"]
    assert generation["eos_token_id"] == [1, 2]
    assert (generation["bos_token_id"], generation["pad_token_id"]) == (1, 3)
    assert (generation["temperature"], generation["top_p"]) == (0.6, 0.9)
    assert (tmp_path / "out" / "LICENSE").is_file()
    assert load_pretrained(run).begin_ids == [1]


def test_training_with_another_tokenizer_leaves_the_token_ids_of_its_model_behind(
    folder, tiny_overrides, tmp_path, cli_here
):
    """They are other tokens now: the bytes 1 and 2 must not end a text."""
    overrides = [o for o in tiny_overrides if not o.startswith("model.") or "context" in o]
    command = ["train", "debug", *set_arguments([*overrides, "data.tokenizer=bytes"])]
    run = tmp_path / "runs" / "debug"
    for steps in (1, 2):  # the second resumes
        command = [*command, "--set", f"train.steps={steps}"]
        cli_here(*command, "--init-from", folder)
        model, tokenizer = sparsellm.load(run)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 256
        assert model.generation_config.temperature in (None, 1.0)
    export(run, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").is_file()


def test_a_run_resumes_from_elsewhere_and_without_the_folder_of_its_tokenizer(
    folder, tiny, train, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    theirs = f"data.tokenizer=hf:{folder.name}"
    train(theirs, "train.steps=2")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # `hf:theirs` is no folder here
    train(theirs, "train.steps=3")
    shutil.rmtree(folder)
    monkeypatch.chdir(tmp_path)
    done = train(theirs, "train.steps=4")
    assert "resuming from" in done.stdout
    sparsellm.train(tiny(theirs, "train.steps=5"))
    assert [r["step"] for r in done.records("train")] == [1, 2, 3, 4, 5]
    refused = train(theirs, "train.steps=2", "name=new", status=1)  # a new run needs it
    assert "data.tokenizer hf:theirs: no such folder" in refused.stderr


def test_a_tokenizer_changed_after_training_is_not_the_models(folder, tiny, tmp_path):
    """A run from scratch with the tokenizer of a folder, of which nothing else is the run's."""
    train_recipe(tiny(f"data.tokenizer=hf:{folder}", "train.steps=1"))
    run = tmp_path / "runs" / "debug"
    (expected,) = load_pretrained(run).tokenizer.encode_batch([TEXT])
    other = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    other.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), other.pre_tokenizer]
    )
    other.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<pad>"}')
    ours = load_pretrained(run)
    assert ours.tokenizer.encode_batch([TEXT])[0].tolist() == expected.tolist()
    assert ours.tokenizer.eot_id == 1
    model, tokenizer = sparsellm.load(run)
    assert tokenizer(TEXT, split_special_tokens=True).input_ids == expected.tolist()
    assert model.generation_config.temperature in (None, 1.0)  # the folder's is not of this model
    assert model.generation_config.eos_token_id == 1
    export(run, tmp_path / "out")
    stock = AutoTokenizer.from_pretrained(tmp_path / "out", split_special_tokens=True)
    assert stock(TEXT).input_ids == expected.tolist()
    train_recipe(tiny("name=next", "train.steps=1", f"data.tokenizer={ours.recipe.data.tokenizer}"))
    with pytest.raises(ValueError, match="the data position was saved with tokenizer"):
        train_recipe(tiny(f"data.tokenizer=hf:{folder}", "train.steps=2"))
    file = find_checkpoint(run) / "tokenizer" / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b"<bos>", b"<box>"))
    with pytest.raises(ValueError, match=r"tokenizer/tokenizer\.json.*not what was written"):
        load_pretrained(run)


def test_a_checkpoint_without_its_tokenizers_files_knows_which_it_was(
    folder, tiny, test_data, tmp_path, error_of
):
    path = checkpoint_of(tiny(f"data.tokenizer=hf:{folder}"))
    assert not (path / "tokenizer").exists()
    load_pretrained(path)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    out = str(tmp_path / "out")
    for command in (
        ["export", str(path), out],
        ["eval", str(path), "--tasks", "piqa", "--data-dir", str(test_data / "eval")],
        ["generate", str(path), "--prompt", "a"],
        ["analyze", str(path)],
        ["train", "debug", "--set", "name=other", "--init-from", str(path)],
    ):
        error = error_of(*command)
        assert f"{path} was trained with another tokenizer than hf:{folder} is now" in error


def test_an_exports_tokenizer_may_not_change_either(folder, tiny, tmp_path):
    export(checkpoint_of(tiny(f"data.tokenizer=hf:{folder}")), tmp_path / "out")
    load_pretrained(tmp_path / "out")
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    other.normalizer = tokenizers.normalizers.Lowercase()
    other.save(str(tmp_path / "out" / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"out.*another tokenizer .* export the checkpoint again"):
        load_pretrained(tmp_path / "out")


def test_the_ids_are_those_of_tokenizer_json_where_transformers_rebuilds_it(
    folder, tmp_path, capsys, cli_here
):
    """As SmolLM's: digits one by one, in a folder of a class that transformers 5 rebuilds."""
    hf_tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert hf_tokenizer.decode([hf_tokenizer.token_to_id("Ġ2024")]) == " 2024"
    hf_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), hf_tokenizer.pre_tokenizer]
    )
    hf_tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        config["tokenizer_class"] = name
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        text = "in 2024"
        expected = PreTrainedTokenizerFast.from_pretrained(folder)(text).input_ids
        assert AutoTokenizer.from_pretrained(folder)(text).input_ids != expected
        import_export(folder, tmp_path / name)
        for place in (folder, tmp_path / name):
            capsys.readouterr()
            tokenizer = sparsellm.load(place).tokenizer
            assert tokenizer(text).input_ids == expected
            assert tokenizer.bos_token == "<bos>"
            assert "AutoTokenizer of transformers rebuilds such a" in capsys.readouterr().err
        printed = cli_here("export", tmp_path / name, tmp_path / f"{name} out").stdout
        assert "AutoTokenizer of transformers 5 rebuilds such" in printed
        assert "**AutoTokenizer**" in (tmp_path / f"{name} out" / "README.md").read_text()


def test_where_they_agree_it_is_auto_tokenizer(folder, capsys):
    tokenizer = sparsellm.load(folder).tokenizer
    assert type(tokenizer) is type(AutoTokenizer.from_pretrained(folder))
    assert "AutoTokenizer" not in capsys.readouterr().err
