"""The plugin of vLLM, by vLLM itself where it is installed; docs/inference.md says how."""

import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparsellm.export import vllm_plugin

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def test_vllm_finds_the_plugin_by_its_entry_point(monkeypatch):
    [entry_point] = [e for e in entry_points(group="vllm.general_plugins") if e.name == "sparsellm"]
    assert entry_point.load() is vllm_plugin.register
    registered: dict[str, str] = {}
    vllm = ModuleType("vllm")
    vllm.ModelRegistry = ModuleType("registry")
    vllm.ModelRegistry.register_model = registered.__setitem__
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    vllm_plugin.register()
    assert registered == {
        "SparseLlamaForCausalLM": "sparsellm.export.vllm_model:SparseLlamaForCausalLM"
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "eager", "ranks"),
    [("relu", True, 1), ("relu", False, 1), ("relu2", False, 1), ("relu2", True, 2)],
)
def test_vllm_computes_the_logits_of_transformers(activation, eager, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "sparsellm")  # no other
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else all of the memory
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join("01"[:ranks]))
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        hidden_act=activation,
        initializer_range=0.2,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    engine = vllm.LLM(
        str(tmp_path),
        hf_overrides={"architectures": [vllm_plugin.ARCHITECTURE]},
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=eager,
        tensor_parallel_size=ranks,
        max_model_len=64,
        max_logprobs=-1,
    )
    options = vllm.SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=-1, detokenize=False
    )
    [answer] = engine.generate({"prompt_token_ids": PROMPT}, options)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        greedy = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, min_new_tokens=8)
    log_probabilities = [
        [by_token[token].logprob for token in range(config.vocab_size)]
        for by_token in answer.prompt_logprobs[1:]
    ]
    torch.testing.assert_close(torch.tensor(log_probabilities), expected[:-1], atol=1e-3, rtol=1e-3)
    assert list(answer.outputs[0].token_ids) == greedy[0, len(PROMPT) :].tolist()
