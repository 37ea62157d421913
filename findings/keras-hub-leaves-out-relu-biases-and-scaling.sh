#!/bin/sh
# Question: KerasHub loads a folder of transformers (Backbone.from_preset). The models are Llama, Qwen3 and GPT-2 with
#   options: ReLU as hidden_act, biases, another rms_norm_eps, scaled RoPE. Are the hidden states those of transformers?
# Guess: yes, or an option that KerasHub's model lacks is refused, as RoPE of type "linear" is in the older form of
#   config.json.
# Seen (keras-hub 0.32.0, keras 3.15.1 on JAX, transformers 5.23.0, fp32, small random models): no. ReLU and GELU run as
#   SiLU, and as GELU in GPT-2; biases of the attention and the FFN are left in the file, unread; Llama's rms_norm_eps is
#   ignored; and of "rope_parameters", the form of transformers 5, the base is read and the scaling is not, so Llama 3.1
#   and its like run without it. The final hidden states are off by 20% to 130% of their largest number. Plain models are
#   right to 1e-4. Nothing warns.
# Hurts: ReLU models, models with biases, and Llama 3.1 or later that transformers 5 saved: training on and evaluating
#   another model than the one that was loaded.
# Packages: torch and tensorflow are large downloads. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 keras-hub==0.32.0 keras==3.15.1 \
    jax==0.10.2 numpy==2.4.6
fi
export CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 KERAS_BACKEND=jax
"$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail "$dir/log"; exit 1; }
import json
import sys
from pathlib import Path

import keras_hub
import numpy as np
import torch
import transformers
from transformers import GPT2Config, LlamaConfig, Qwen3Config

VOCABULARY, TOKENS = 300, 40
llama = dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
gpt2 = dict(vocab_size=VOCABULARY, n_embd=128, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
scaling["original_max_position_embeddings"] = 16
cases = {  # and whether KerasHub is right
    "Llama": (LlamaConfig(**llama), True),
    "Llama with ReLU": (LlamaConfig(**llama, hidden_act="relu"), False),
    "Llama with GELU": (LlamaConfig(**llama, hidden_act="gelu"), False),
    "Llama with attention_bias": (LlamaConfig(**llama, attention_bias=True), False),
    "Llama with mlp_bias": (LlamaConfig(**llama, mlp_bias=True), False),
    "Llama with rms_norm_eps of 1e-2": (LlamaConfig(**llama, rms_norm_eps=1e-2), False),
    "Llama, RoPE's base 500,000": (LlamaConfig(**llama, rope_parameters=dict(rope_type="default", rope_theta=5e5)), True),
    "Llama, RoPE scaled": (LlamaConfig(**llama, rope_parameters=scaling | dict(rope_theta=5e5)), False),
    "Llama, RoPE scaled, older form": (LlamaConfig(**llama, rope_parameters=scaling | dict(rope_theta=5e5)), True),
    "Qwen3": (Qwen3Config(**llama, head_dim=32), True),
    "Qwen3 with ReLU": (Qwen3Config(**llama, head_dim=32, hidden_act="relu"), False),
    "GPT-2": (GPT2Config(**gpt2), True),
    "GPT-2 with ReLU": (GPT2Config(**gpt2, activation_function="relu"), False),
}
for name, (config, right) in cases.items():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(3)
            elif "bias" in weight_name:
                weight.normal_(0, 0.3)
        tokens = torch.randint(3, VOCABULARY, (1, TOKENS))
        expected = model(tokens, output_hidden_states=True).hidden_states[-1].numpy()
    folder = Path(sys.argv[1], name)
    model.save_pretrained(folder)
    if "older form" in name:
        settings = json.loads((folder / "config.json").read_text())
        settings["rope_scaling"] = settings.pop("rope_parameters")
        settings["rope_theta"] = settings["rope_scaling"].pop("rope_theta")
        (folder / "config.json").write_text(json.dumps(settings))
    backbone = keras_hub.models.Backbone.from_preset(str(folder))
    inputs = {"token_ids": tokens.numpy().astype(np.int32), "padding_mask": np.ones((1, TOKENS), np.int32)}
    error = float(np.abs(np.array(backbone(inputs)) - expected).max() / np.abs(expected).max())
    print(f"{name}: {error:.2%} off")
    assert error < 1e-3 if right else error > 0.1, "the behaviour has changed"
PY
