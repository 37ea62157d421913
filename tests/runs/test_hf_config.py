"""Models of other people's: imported by their config.json, and exported in the same class."""

import contextlib
import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsellm
from runs.hf_models import MODELS, PUBLISHED, change, logits, short_text, stock_model, write_model
from sparsellm.export.card import model_card
from sparsellm.export.save_export import export, import_export
from sparsellm.recipe.estimate import count_parameters
from sparsellm.recipe.sections import RuntimeConfig
from sparsellm.runs.huggingface.hf_config import derive_recipe
from sparsellm.runs.huggingface.pretrained import load_pretrained, load_stock
from sparsellm.runs.huggingface.recipe_of import load_recipe_of
from sparsellm.training.objective import Objective


@pytest.fixture
def folder(request, tmp_path):
    return write_model(stock_model(request.param), tmp_path / "theirs")


every_model = pytest.mark.parametrize("folder", MODELS, indirect=True)


@pytest.mark.parametrize("folder", ["Qwen3"], indirect=True)
def test_the_card_of_others_weights_claims_no_training_of_ours(folder, tmp_path):
    written, _ = import_export(folder, tmp_path / "run")
    imported = load_pretrained(written)
    card = model_card(imported, "fp32")
    assert "Unknown: sparsellm has not trained these weights." in card
    head = card.partition("\n---\n")[0]
    assert "datasets" not in head
    assert "language" not in head
    run_state = {"name": "theirs", "step": 0, "tokens": 0}
    trainer = {"step": 1, "tokens": 256, "init_from": run_state}
    card = model_card(dataclasses.replace(imported, trainer=trainer), "fp32")
    assert "| initial weights | `theirs`, not counted above |" in card
    assert "datasets" in card.partition("\n---\n")[0]


@every_model
def test_logits_are_stock_transformers_after_import_and_after_export(folder, tmp_path):
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    expected = logits(theirs)
    written, _ = import_export(folder, tmp_path / "run")
    ours = load_pretrained(written)
    assert torch.equal(logits(ours.model), expected)
    assert torch.equal(logits(load_pretrained(folder).model), expected)
    assert count_parameters(ours.recipe).total == theirs.num_parameters()
    export(written, tmp_path / "exported", "fp32")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert type(back) is type(theirs)
    assert torch.equal(logits(back), expected)
    export(folder, tmp_path / "directly", "fp32")
    directly = AutoModelForCausalLM.from_pretrained(tmp_path / "directly")
    assert torch.equal(logits(directly), expected)
    other = {"_name_or_path", "max_window_layers"}  # layer_types says which layers have windows
    config = {key: value for key, value in theirs.config.to_dict().items() if key not in other}
    assert {key: back.config.to_dict()[key] for key in config} == config
    text = "It's 2,048 zeros"
    ids = [
        AutoTokenizer.from_pretrained(f)(text).input_ids for f in (folder, tmp_path / "exported")
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("folder", ["Llama 2"], indirect=True)
def test_rope_of_which_a_part_is_stated_elsewhere_in_the_file(folder, tmp_path):
    scaling = {"type": "longrope", "short_factor": [1.1] * 4, "long_factor": [2.0] * 4}
    before = {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": scaling}
    change(folder, before | {"original_max_position_embeddings": 16})
    expected = logits(AutoModelForCausalLM.from_pretrained(folder))
    export(folder, tmp_path / "exported", "fp32")
    for model in (
        load_pretrained(folder).model,
        AutoModelForCausalLM.from_pretrained(tmp_path / "exported"),
    ):
        assert torch.equal(logits(model), expected)


@every_model
def test_loss_and_gradients_are_stock_transformers(folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    theirs.config.attention_dropout = 0.0
    ours = load_pretrained(folder)
    tokens = torch.arange(34).view(2, 17) * 7
    sums = Objective(ours.model, RuntimeConfig(compile=False))(tokens[:, :-1], tokens[:, 1:])
    (sums.cross_entropy_sum / 32).backward()
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(sums.cross_entropy_sum / 32, expected)
    parameters = dict(ours.model.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("folder", ["Qwen3"], indirect=True)
def test_training_begins_with_the_model_and_the_tokenizer_of_the_weights(
    folder, tiny_overrides, train, tmp_path
):
    # Without the keys of the tiny model: it is the folder's.
    tiny_overrides[:] = [o for o in tiny_overrides if not o.startswith("model.") or "context" in o]
    words = [f"--init-from={folder}", "ffn.activation=relu", *short_text(tmp_path)]
    out = train(*words, "train.steps=1").stdout
    assert f"weights of {folder}; the optimizer and the data begin at step 0" in out
    assert "changed since the checkpoint: ffn.activation silu → relu" in out
    recipe = load_pretrained(tmp_path / "runs" / "debug").recipe
    derived = load_recipe_of(folder)
    assert recipe.data.tokenizer == derived.data.tokenizer == f"hf:{folder}"
    assert recipe.model == derived.model.model_copy(update={"context_length": 32})
    assert recipe.model.family == "qwen3"
    trained_model, theirs = (
        load_pretrained(f).model for f in (tmp_path / "runs" / "debug", folder)
    )
    for trained, original in zip(trained_model.parameters(), theirs.parameters(), strict=True):
        assert 0 < (trained - original).abs().max() < 0.005  # one step at a rate of 0.003
    assert "resuming from" in train(*words, "train.steps=2").stdout
    export(tmp_path / "runs" / "debug", tmp_path / "out", "fp32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["hidden_act"], config["max_position_embeddings"]) == ("relu", 64)


@pytest.mark.parametrize("folder", ["Llama 2"], indirect=True)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"mlp_bias": True},
            "mlp_bias is True and the recipe's model has False; that value cannot",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; valid are relu"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; valid are llama, "),
        ({"model_type": "brandnew", "auto_map": {"AutoConfig": "own.C"}}, "'brandnew' is not supp"),
        # transformers makes another one of it
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "'ministral' is not"),
        ({"rope_parameters": {"rope_type": "x", "rope_theta": 1.0}}, "rope_type 'x' is not supp"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config"),
        ({"is_causal": False}, "is_causal is False and the recipe's model has True; that value"),
        ({"head_dim": 7}, "config.json "),  # by transformers, or by the recipe
        ({"num_attention_heads": 0}, "cannot be read"),
        ({"vocab_size": 200}, "model.vocab_size 200 is less than the 257 ids"),
        ({"num_hidden_layers": 2}, "has model.layers.2.input_layernorm.weight and "),
        ({"intermediate_size": 40}, "the recipe's model (40, 32); export the checkpoint again, or"),
    ],
    ids=str,
)
def test_what_cannot_be_carried_is_refused_by_name(folder, fields, reason, tmp_path, error_of):
    change(folder, fields)
    error = error_of("import", folder, tmp_path / "run")
    assert reason in error
    assert str(folder) in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("folder", ["Mistral 0.1"], indirect=True)
def test_fields_that_the_family_does_not_read_are_left_behind(folder):
    before = derive_recipe(folder, folder)
    change(folder, {"attention_bias": True, "no_rope_layers": [1, 0, 1]})
    assert derive_recipe(folder, folder) == before
    assert before.model.huggingface["sliding_window"] == 24


@pytest.mark.parametrize("name", ["Qwen2, windows", "ReLU, tied"])
def test_any_value_of_any_field_is_taken_or_refused(name, tmp_path):
    folder = write_model(stock_model(name), tmp_path / "theirs")
    if name == "ReLU, tied":
        change(folder, PUBLISHED)
    config = json.loads((folder / "config.json").read_text())
    for key in config:
        for value in (None, -1, "x", {"a": None}):
            (folder / "config.json").write_text(json.dumps(config | {key: value}))
            with contextlib.suppress(ValueError):
                derive_recipe(folder, folder)


@pytest.mark.parametrize("folder", ["Llama 2"], indirect=True)
@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_missing_file_is_named(folder, missing, tmp_path, error_of):
    (folder / missing).unlink()
    assert missing in error_of("import", folder, tmp_path / "run")


@pytest.mark.parametrize("folder", ["Llama 2"], indirect=True)
def test_weights_in_another_format_and_a_damaged_configuration(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin: only weights in safetensors are read"
    ):
        import_export(folder, tmp_path / "run")
    (folder / "config.json").write_text('{"a":')
    with pytest.raises(ValueError, match=r"^[^ ]*config\.json is damaged: not JSON [^;]*; [^;]*$"):
        import_export(folder, tmp_path / "run")


@pytest.mark.parametrize("folder", ["Llama 2"], indirect=True)
def test_one_file_beside_an_index_of_other_shards_is_read_as_by_transformers(folder, capsys):
    weights, shard = load_file(folder / "model.safetensors"), "model-00001-of-00001.safetensors"
    save_file({name: 2 * w for name, w in weights.items()}, folder / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = logits(AutoModelForCausalLM.from_pretrained(folder))
    for load in (load_pretrained, sparsellm.load):
        capsys.readouterr()
        assert torch.equal(logits(load(folder).model), expected)
        assert (
            f"{folder} has two models: model.safetensors, which is read" in capsys.readouterr().err
        )
    (folder / shard).unlink()  # there is one
    load_pretrained(folder)
    assert "two models" not in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["SmolLM"], indirect=True)
def test_a_tied_model_may_be_stored_by_its_output_layer_alone(folder, tmp_path):
    """As safetensors' `save_model` does, which keeps one of two names of a tensor."""
    expected = logits(AutoModelForCausalLM.from_pretrained(folder))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(sparsellm.load(folder).model), expected)
    written, _ = import_export(folder, tmp_path / "run")
    export(folder, tmp_path / "out", "fp32")
    for place in (folder, written, tmp_path / "out"):
        assert torch.equal(logits(load_pretrained(place).model), expected)
    assert "model.embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("folder", ["SmolLM"], indirect=True)
def test_a_tied_models_own_output_layer_must_be_the_embedding(folder, tmp_path):
    expected = logits(AutoModelForCausalLM.from_pretrained(folder))
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(load_pretrained(folder).model), expected)
    save_file(
        weights | {"lm_head.weight": 2 * head}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"theirs: lm_head\.weight is not model\.embed_tokens"):
        import_export(folder, tmp_path / "run")
    change(folder, {"tie_word_embeddings": False})
    untied = logits(AutoModelForCausalLM.from_pretrained(folder))
    assert not torch.equal(untied, expected)
    assert torch.equal(logits(load_pretrained(folder).model), untied)


def _transposed(name, tensor):
    return tensor.t() if name.endswith("down_proj.weight") else tensor


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("stock", "fields"),
    [
        ("ReLU, tied", {}),
        ("ReLU, tied", {"intermediate_size": 96, "sparsity_new_intermediate_size": 48}),
        ("ReLU, tied", {"tie_word_embeddings": None, "rope_theta": None, "rope_parameters": None}),
        ("ReLU, no gate", {"sparsity_gated_mlp": False}),
        ("ReLU, Qwen2", {"model_type": "qwen2_sparse_relu"}),
    ],
)
def test_the_papers_checkpoints_are_read_by_their_fields(stock, fields, transposed, tmp_path):
    """Synthetic ones: stock models with the fields that those have."""
    model = stock_model(stock)
    folder = write_model(model, tmp_path / "theirs")
    change(folder, PUBLISHED | fields, *([_transposed] if transposed else []))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    written, _ = import_export(folder, tmp_path / "run")
    expected = logits(model)
    assert torch.equal(logits(load_pretrained(folder).model), expected)
    assert torch.equal(logits(load_pretrained(written).model), expected)
    assert load_pretrained(written).recipe.ffn.activation == "relu"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mlp_bias": True}, "mlp_bias is True"),
        (
            {"model_type": "qwen2_sparse_relu", "sparsity_gated_mlp": False},
            "sparsity_gated_mlp: false has no stock model with qwen2's attention",
        ),
        ({"intermediate_size": None}, "cannot be read ('intermediate_size')"),
        ({"sparsity_new_intermediate_size": 40}, "has shape (48, 32), the recipe's model (40, 32)"),
    ],
)
def test_a_published_checkpoint_that_cannot_be_read(fields, reason, tmp_path):
    folder = write_model(stock_model("ReLU, tied"), tmp_path / "theirs")
    change(folder, PUBLISHED | fields)
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        import_export(folder, tmp_path / "run")
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields"), [("ReLU, tied", PUBLISHED), ("Qwen3", {"hidden_act": "relu"})]
)
def test_a_folder_is_analyzed_continued_and_scored(name, fields, tmp_path, cli_here):
    folder = write_model(stock_model(name), tmp_path / "theirs")
    change(folder, fields)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "so it is " * 40}))
    data = ["--data", str(tmp_path / "text.jsonl")]
    out = ["--out", str(tmp_path / "analysis")]
    cli_here("analyze", folder, *data, "--tokens", "128", *out)
    statistics = json.loads((tmp_path / "analysis" / "statistics.json").read_text())
    assert 0 < statistics["layers"][0]["nnz_mean"] < 48
    text = cli_here("generate", folder, *data, "--max-new-tokens", "3").stdout
    assert text.startswith("so it is so it is ")
    scored = load_stock("me/it", folder, torch.device("cpu"), torch.float32)
    assert torch.equal(logits(scored.model), logits(load_pretrained(folder).model))
