#!/bin/sh
# Question: tinygrad's package for language models, tinygrad.llm, loads a GGUF file by Transformer.from_gguf. The file is a
#   Llama 3.1 (RoPE scaled by its tensor rope_freqs), a Qwen2 with YaRN, a Granite (with its four multipliers) or a Gemma.
#   Are the logits those of the model?
# Guess: yes, or the file is refused: its metadata name the architecture and the type of scaling.
# Seen (tinygrad 0.13.0, DEV=PYTHON, gguf 0.19.0, transformers 5.24.0, fp32): no for all four, and there is no message. Only
#   sizes, RoPE's base and weights are read: rope_freqs, rope.scaling.* and Granite's multipliers have no effect, and
#   a Granite or Gemma is computed as a Llama (SiLU, no scale of the embeddings, other order of RoPE's rows). A plain Llama
#   and a plain Qwen2 are right. from_gguf of 0.14.0 reads none of these either; its wheel lacks a module that it imports.
# Hurts: whoever generates or scores with such a file by tinygrad; Llama 3.1 and 3.2 are in its own list of models. That a
#   file loads and gives text says nothing: compare log-probabilities with those of another program.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 transformers==5.24.0 gguf==0.19.0 \
    tinygrad==0.13.0
fi
export HF_HUB_OFFLINE=1 DEV=PYTHON HALF=0
"$PYTHON" -W ignore - "$dir/model.gguf" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import sys
from importlib.metadata import version

import gguf
import numpy as np
import torch
import transformers
from tinygrad import Tensor
from tinygrad.llm.model import Transformer

path = sys.argv[1]
torch.manual_seed(0)
tokens = torch.randint(0, 32, (1, 10))


def make(name, rope=None, **settings):
    config = getattr(transformers, name + "Config")(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4,
        rope_parameters={"rope_theta": 10_000.0, **(rope or {"rope_type": "default"})}, **settings)  # fmt: skip
    return getattr(transformers, name + "ForCausalLM")(config).eval()


def write(model, architecture, add):
    """Writes a GGUF file with llama.cpp's names and order of rows (Llama, Granite: RoPE's pairs are neighbours)."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_token_list([f"<{token}>" for token in range(32)])
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), 1)
    for key, weight in model.state_dict().items():
        if architecture in ("llama", "granite") and ("q_proj" in key or "k_proj" in key):
            weight = weight.reshape(-1, 2, 4, 16).transpose(1, 2).reshape(weight.shape)
        if architecture == "gemma" and key == "lm_head.weight":
            continue  # the embedding's
        if architecture == "gemma" and "norm" in key:
            weight = weight + 1
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), weight.contiguous().numpy())
    add(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_freqs(writer, model):
    plain = 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())


def yarn(writer, model):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def multipliers(writer, model):
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.22)
    writer.add_attention_scale(0.125)
    writer.add_logit_scale(8.0)


granite = dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.125, logits_scaling=8.0)
length = dict(original_max_position_embeddings=16)
llama_3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **length)
cases = (
    ("Llama", make("Llama"), "llama", lambda writer, model: None),
    ("Llama with the RoPE of Llama 3.1", make("Llama", llama_3), "llama", rope_freqs),
    ("Qwen2", make("Qwen2"), "qwen2", lambda writer, model: None),
    ("Qwen2 with YaRN", make("Qwen2", dict(rope_type="yarn", factor=4.0, **length)), "qwen2", yarn),
    ("Granite", make("Granite", **granite), "granite", multipliers),
    ("Gemma", make("Gemma", tie_word_embeddings=True), "gemma", lambda writer, model: None),
)
print("tinygrad", version("tinygrad"))
for name, model, architecture, add in cases:
    write(model, architecture, add)
    with torch.no_grad():
        wanted = model(tokens).logits.log_softmax(-1)
    loaded, _ = Transformer.from_gguf(path)
    hidden = loaded.token_embd(Tensor(tokens.numpy().astype(np.int32))).float()
    for block in loaded.blk:
        hidden = block(hidden, 0)
    seen = torch.tensor(loaded.output(loaded.output_norm(hidden)).tolist()).log_softmax(-1)
    difference = (wanted - seen).abs().max().item()
    same = (wanted.argmax(-1) == seen.argmax(-1)).float().mean().item()
    print(f"{name}: log-probabilities differ by up to {difference:.3f}, {same:.0%} of the likeliest tokens are equal")
    assert (difference < 0.01) == (name in ("Llama", "Qwen2")), "the behaviour has changed"
    assert difference < 0.01 or difference > 0.05, "the behaviour has changed"
PY
