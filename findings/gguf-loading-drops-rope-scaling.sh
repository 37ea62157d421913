#!/bin/sh
# Question: transformers loads a GGUF file, `from_pretrained(folder, gguf_file=…)`. The file's model has scaled RoPE:
#   the kinds linear or yarn, or the frequency factors of Llama 3.1 (rope_freqs). Are the logits those of the model?
# Guess: yes, up to the file's quantisation, or a warning that scaling is not supported.
# Seen (transformers 5.23.0, gguf 0.19.0; Llama, weights in fp32): no, and there is no warning. Only the base of RoPE is
#   read, rope_parameters says "default", and the logits differ by 76% to 91% of their size in a text of 2,000 tokens.
#   Without scaling, they are equal to the last bit.
# Hurts: Llama 3.1 and later, and models with extended context, that are loaded from GGUF to be evaluated, fine-tuned or
#   converted back: they are a little off in short texts and wrong in long ones. Take the config from the original.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 gguf==0.19.0
fi
"$PYTHON" - "$dir" <<'PY'
import math
import sys

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HEADS, DIM, THETA, CONTEXT = 2, 32, 5e5, 1024
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES |= {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
NAMES |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
NAMES |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write(path, model, scaling):
    """Writes the model as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(4 * CONTEXT)
    writer.add_embedding_length(HEADS * DIM)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    writer.add_rope_dimension_count(DIM)
    writer.add_rope_freq_base(THETA)
    scaling(writer)
    for name, weight in model.state_dict().items():
        array, name = weight.numpy(), name.removesuffix(".weight")
        if name.endswith(("q_proj", "k_proj")):  # GGUF has the two halves of a head interleaved
            array = array.reshape(HEADS, 2, DIM // 2, -1).swapaxes(1, 2).reshape(array.shape)
        layer = "blk.0." if name.startswith("model.layers.0.") else ""
        writer.add_tensor(f"{layer}{NAMES[name.removeprefix('model.layers.0.')]}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_kind(kind):
    def scaling(writer):
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(CONTEXT)

    return scaling


def factors_of_llama3(writer, factor=8.0, low=1.0, high=4.0):
    factors = []
    for i in range(0, DIM, 2):
        turns = CONTEXT / (2 * math.pi * THETA ** (i / DIM))
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
cases = {
    "default": ({}, lambda writer: None),
    "linear": ({"factor": 4.0}, of_kind(gguf.RopeScalingType.LINEAR)),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": CONTEXT}, of_kind(gguf.RopeScalingType.YARN)),
    "llama3": (llama3 | {"original_max_position_embeddings": CONTEXT}, factors_of_llama3),
}
sizes = {"vocab_size": 64, "hidden_size": HEADS * DIM, "intermediate_size": 128, "num_hidden_layers": 1}
sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 4 * CONTEXT}
seen = {}
for kind, (parameters, scaling) in cases.items():
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": THETA} | parameters
    # Larger weights than at initialisation: attention depends on positions, as after training.
    config = LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rope, initializer_range=0.2)
    model = LlamaForCausalLM(config).eval()
    write(f"{sys.argv[1]}/{kind}.gguf", model, scaling)
    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=f"{kind}.gguf").eval()
    ids = torch.randint(64, (1, 2000))
    with torch.no_grad():
        logits, of_loaded = model(ids).logits, loaded(ids).logits
    seen[kind] = ((logits - of_loaded).norm() / logits.norm()).item()
    print(f"{kind}: loaded with {loaded.config.rope_parameters}; logits differ by {seen[kind]:.0%}", flush=True)
assert seen.pop("default") < 1e-5
assert all(difference > 0.3 for difference in seen.values()), "the behaviour has changed"
PY
