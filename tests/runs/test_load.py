"""`sparsellm.load`: whatever a model is, it comes with its tokenizer, as transformers' classes."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import sparsellm
from runs.hf_models import PUBLISHED, change, logits, stock_model, write_model
from sparsellm.export.save_export import export, import_export
from sparsellm.ffn.inference_ops import sparse_ffn
from sparsellm.ffn.inference_path import replace
from sparsellm.runs.huggingface import pretrained as loading
from sparsellm.runs.huggingface.hf_tokenizer import write_tokenizer


@pytest.fixture
def folder(tmp_path):
    return write_model(stock_model("Llama 3"), tmp_path / "theirs")


def test_a_run_a_checkpoint_an_export_and_a_folder_give_the_same(folder, tmp_path):
    written, _ = import_export(folder, tmp_path / "run")
    export(written, tmp_path / "exported", "fp32")
    expected = logits(stock_model("Llama 3"))
    for place in (folder, str(folder), written, tmp_path / "run", tmp_path / "exported"):
        model, tokenizer = sparsellm.load(place)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert not model.training
        assert model.dtype == torch.float32
        assert torch.equal(logits(model), expected)
        ids = tokenizer("def x", return_tensors="pt")
        assert ids.input_ids.tolist() == [list(b"def x")]
        text = tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])
        assert text.startswith("def x")


@pytest.mark.parametrize("suppressed", [None, [65, 66]])
def test_ids_that_only_pad_the_embedding_are_not_generated(folder, tmp_path, suppressed):
    """Also where the model's own folder names others that are not to be."""
    settings = {"eos_token_id": 256, **({"suppress_tokens": suppressed} if suppressed else {})}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    written, _ = import_export(folder, tmp_path / "run")
    model, _ = sparsellm.load(written)
    with torch.no_grad():
        model.lm_head.weight[257:] *= 1000
    generated = model.generate(torch.tensor([[64]]), max_new_tokens=20, do_sample=True)[0]
    assert generated.max() < 257
    assert set(suppressed or []) <= set(model.generation_config.suppress_tokens)


def test_a_model_of_no_family_of_ours_is_loaded_by_transformers(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=257)).eval()
    model.save_pretrained(tmp_path)
    write_tokenizer("bytes", tmp_path, 64)
    assert torch.equal(logits(sparsellm.load(tmp_path).model), logits(model))


def test_the_papers_checkpoints(tmp_path):
    model = stock_model("ReLU, tied")
    folder = write_model(model, tmp_path / "theirs")
    change(folder, PUBLISHED)
    loaded, tokenizer = sparsellm.load(folder)
    assert torch.equal(logits(loaded), logits(model))
    assert tokenizer("a").input_ids == [97]
    change(folder, {"mlp_bias": True})
    with pytest.raises(ValueError, match="mlp_bias is True"):
        sparsellm.load(folder)


@pytest.mark.parametrize("name", ["ReLU, tied", "ReLU, no gate"])
def test_the_papers_checkpoints_accelerated(name, tmp_path, monkeypatch):
    folder = write_model(stock_model(name), tmp_path / "theirs")
    change(folder, PUBLISHED | {"sparsity_gated_mlp": name == "ReLU, tied"})
    model, _ = sparsellm.load(folder, dtype=torch.bfloat16)
    prompt = torch.tensor([[65, 66, 67]])
    options = {"max_new_tokens": 4, "do_sample": False}
    expected, text = logits(model), model.generate(prompt, **options)
    calls = []
    monkeypatch.setattr(replace, "sparse_ffn", lambda *a: calls.append(a) or sparse_ffn(*a))
    assert len(sparsellm.accelerate(model, kernels="sparse").accelerated) == 3
    torch.testing.assert_close(logits(model), expected, rtol=0.02, atol=0.02)
    assert len(calls) == 3
    assert torch.equal(model.generate(prompt, **options), text)


def test_device_type_and_mistakes(folder, tmp_path, monkeypatch):
    for dtype in ("bf16", torch.bfloat16):
        assert sparsellm.load(folder, "cpu", dtype).model.dtype == torch.bfloat16
    monkeypatch.setattr(loading, "put_kernels_under", lambda _: pytest.fail("on a CPU"))
    sparsellm.load(folder)
    with pytest.raises(ValueError, match="precision fp8 needs a GPU"):
        sparsellm.load(folder, "cpu", precision="fp8")
    with pytest.raises(ValueError, match="precision 'fp4' must be one of model, fp8"):
        sparsellm.load(folder, "cpu", precision="fp4")
    with pytest.raises(FileNotFoundError, match=r"is not a checkpoint .* or a Hugging Face folder"):
        sparsellm.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="nonsense"):
        sparsellm.load(folder, "nonsense")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text()[:100])
    with pytest.raises(ValueError, match=f"{folder}: transformers cannot load its tokenizer: "):
        sparsellm.load(folder)
    tokenizer.unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=rf"{folder}: it has no tokenizer; .*save_pretrained"):
        sparsellm.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{folder}: transformers cannot load it: .*safetensors"):
        sparsellm.load(folder)


def test_an_adapter_is_not_left_out_silently(folder, monkeypatch):
    (folder / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(loading, "is_peft_available", lambda: False)
    for load in (sparsellm.load, loading.load_pretrained):
        with pytest.raises(ValueError, match=r"adapter_config\.json: .* merge it: "):
            load(folder)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 4}, "lack 9 tensors of the model in config.json, such as model.lay"),
        ({"tie_word_embeddings": False}, "lack 1 tensors of the model in config.json, such as lm_"),
        ({"intermediate_size": 40}, r"proj.weight has shape \((48, 32|32, 48)\), config.json asks"),
        ({"hidden_act": "foo"}, "KeyError 'foo'; .* put the model's own file back"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}, "which sparsellm never runs"),
    ],
)
def test_what_transformers_would_leave_random_is_refused(folder, fields, reason):
    change(folder, fields)
    with pytest.raises(ValueError, match=f"{folder}: .*{reason}"):
        sparsellm.load(folder)
