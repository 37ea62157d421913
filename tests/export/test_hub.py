"""Models on the hub: `export --push`, and `eval` and `train --init-from` by name."""

import json
import os

import pytest
import warm
import yaml
from conftest import python, set_arguments
from fake_model_hub import TOKEN, FakeModelHub
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparsellm.paths import hub_id


@pytest.fixture
def hub():
    with FakeModelHub() as running:
        yield running


@pytest.fixture
def command(hub, tmp_path, monkeypatch):
    """Runs ``sparsellm`` in a process that takes the fake hub for the real one."""

    def run(*arguments, token=TOKEN, status=0):
        environment = hub.environment() | {"HF_HOME": str(tmp_path / "cache")}
        environment |= {"HF_TOKEN": token or ""}
        monkeypatch.chdir(tmp_path)
        return warm.run("-m", "sparsellm", *arguments, status=status, **environment)

    return run


@pytest.mark.long
def test_pushed_and_trained_on_by_name(hub, command, train, tiny_overrides, tmp_path):
    overrides = ["validation.every_steps=0", "train.steps=2"]
    exported = ["export", str(train(*overrides).path), "out", "--dtype", "fp32"]
    pushed = command(*exported, "--license", "mit", "--push", "me/tiny", "--private")
    assert f"pushed {hub.endpoint}/me/tiny" in pushed.stdout
    assert hub.private["me/tiny"]
    assert hub.messages == ["sparsellm export of step_00000002"]
    local = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {name: hub.repos["me/tiny"][name] for name in local} == local
    head = yaml.safe_load(local["README.md"].decode().split("---\n")[1])
    assert head["license"] == "mit"

    new = set_arguments([*tiny_overrides, *overrides, "name=second"])
    trained = command("train", "debug", *new, "--init-from", "me/tiny", token=None)
    assert "weights of " in trained.stdout
    assert "step 2/2" in trained.stdout
    missing = command("train", "debug", *new, "--fresh", "--init-from", "me/none", status=1)
    assert (
        "me/none: no such folder here, and no such model on the Hugging Face hub" in missing.stderr
    )


def test_a_refused_push_keeps_the_folder(command, error_of, train, tmp_path, monkeypatch):
    exported = ["export", str(train("validation.every_steps=0", "train.steps=1").path)]
    refused = command(*exported, "out", "--push", "me/tiny", token="hf_" + "y" * 34, status=1)
    assert "out is complete here" in refused.stderr
    assert "hf upload me/tiny out" in refused.stderr
    assert (tmp_path / "out" / "config.json").is_file()
    exported.append(str(tmp_path / "other"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for words, reason in (
        (["--push", "me/tiny"], "you are not logged in"),
        (["--push", "tiny"], "name the owner too"),
        (["--license", "Apache 2"], "--license"),
    ):
        assert reason in error_of(*exported, *words)
    assert not (tmp_path / "other").exists()


def _dense_model(hub, folder) -> Tokenizer:
    """Puts a stock model into the folder and, as them/dense, on the hub; returns its tokenizer."""
    words = {chr(value): value for value in range(256)}
    config = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = LlamaForCausalLM(
        LlamaConfig(**config, num_attention_heads=2, max_position_embeddings=512)
    )
    letters = Tokenizer(models.BPE(vocab=words | {"<|end|>": 256}, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token="<|end|>", bos_token="<|end|>", pad_token="<|end|>"
    ).save_pretrained(folder)
    hub.repos["them/dense"] = {p.name: p.read_bytes() for p in folder.iterdir()}
    return letters


@pytest.mark.long
def test_another_dense_model_is_scored_by_its_name(hub, command, cli_here, test_data, tmp_path):
    letters = _dense_model(hub, tmp_path / "dense")
    data = ["--data-dir", str(test_data / "eval"), "--tasks", "piqa", "--limit", "6"]
    command("eval", "them/dense", *data, token=None)
    report = json.loads((tmp_path / "eval_them--dense_piqa_limit6.json").read_text())
    assert (report["checkpoint"], report["step"]) == ("them/dense", None)
    assert 0 <= report["tasks"]["piqa"]["acc"] <= 1
    cli_here("eval", tmp_path / "dense", *data, "--out", tmp_path / "here.json")
    assert json.loads((tmp_path / "here.json").read_text())["tasks"] == report["tasks"]
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / "dense")
    unmarked = cli_here("eval", tmp_path / "dense", *data, status=1).stderr
    assert "neither a beginning-of-text nor an end-of-text token" in unmarked
    assert str(tmp_path / "dense" / "tokenizer_config.json") in unmarked


@pytest.mark.long
def test_an_export_of_a_model_of_the_hub_names_it(hub, command, tmp_path):
    _dense_model(hub, tmp_path / "dense")
    for name in ("consolidated.safetensors", "original/consolidated.00.safetensors"):
        hub.repos["them/dense"][name] = b"the same weights once more, in another format"
    command("export", "them/dense", "out", token=None)
    [weights] = (tmp_path / "cache").rglob("snapshots/*/*.safetensors")
    assert weights.name == "model.safetensors"
    assert not list((tmp_path / "cache").rglob("original"))
    texts = [
        p.read_text(encoding="utf-8")
        for p in (tmp_path / "out").iterdir()
        if p.suffix in {".md", ".yaml"}
    ]
    assert len(texts) == 2  # the model card and the recipe
    assert all("dense" in text and "snapshots" not in text for text in texts)  # as in the cache


@pytest.mark.long
def test_a_revision_may_have_slashes(hub, command, tmp_path):
    """As a pull request's has."""
    _dense_model(hub, tmp_path / "dense")
    command("import", "them/dense@refs/pr/1", "run", token=None)
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["name"] == "dense"
    assert recipe["data"]["tokenizer"] == "hf:them/dense@refs/pr/1"


def test_what_is_a_name_on_the_hub(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    os.mkdir("runs")  # noqa: PTH102
    names = ("me/model", "me/model@v1.2", "HuggingFaceTB/SmolLM-135M")
    assert all(hub_id(Path(name)) == name for name in names)
    no_names = ("runs/debug", "model", "a/b/c", "/abs/model", "../me/model", ".", "runs")
    assert all(hub_id(Path(name)) is None for name in no_names)


_TOKENIZER = """
import sys
from sparsellm.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
print(tokenizer.eot, tokenizer.begin_ids, tokenizer.encode_batch(["cats </s>"])[0].tolist())
"""


def test_a_tokenizer_of_the_hub_comes_with_all_that_decides_its_ids(hub, tmp_path):
    """Its end-of-document token is named by its token map alone; later it is read offline."""
    hf_tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate("</s> cat")}, []))
    hf_tokenizer.add_special_tokens(["<|endoftext|>", "</s>"])
    files = {"tokenizer.json": hf_tokenizer.to_str().encode(), "model.safetensors": b"not read"}
    files["special_tokens_map.json"] = b'{"eos_token": "</s>"}'
    hub.repos["me/letters"] = files
    environment = hub.environment() | {"HF_HOME": str(tmp_path), "HF_TOKEN": ""}

    def load(status=0, **extra):
        words = ("-c", _TOKENIZER, "hf:me/letters")
        return python(*words, status=status, **environment | extra)

    ids = [*hf_tokenizer.encode("cats ").ids, 0, 1, 2, 3]  # spelt out, it is text
    expected = f"</s> [] {ids}\n"
    for extra in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert load(**extra).stdout == expected
    assert not list(tmp_path.rglob("*.safetensors"))
    files.pop("tokenizer.json")
    missing = load(status=1, HF_HOME=str(tmp_path / "other"))
    assert "me/letters has no tokenizer.json: it has no fast tokenizer" in missing.stderr
