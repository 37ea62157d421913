#!/bin/sh
# Question: a mixture of experts (here a small Qwen3-MoE; Mixtral, DeepSeek and others are alike) is loaded in 4 or 8
#   bits, from_pretrained(folder, quantization_config=…), by bitsandbytes, torchao or quanto, or quantised by torchao's
#   quantize_. Nearly all of its weights are the experts'. How much memory does it take?
# Guess: about a quarter or half of that of bf16. All matrices but the embedding, the head and the router are quantised,
#   as the experts were with transformers 4, where each of their matrices was a Linear.
# Seen (transformers 5.24.0, bitsandbytes 0.50.2, torchao 0.18.0, optimum-quanto 0.2.7): 90% or more. transformers 5
#   stores the experts of a layer as two three-dimensional parameters, and the four ways look for Linear modules alone:
#   the attention is quantised, and the experts stay in bf16. There is no message. With transformers 4.57.6, the same call
#   in 4 bits quantised every expert.
# Hurts: whoever expects a mixture to fit: loading runs out of memory, or takes four times as much as planned. And
#   comparisons of quantised mixtures: what is measured is a model with experts in bf16. llm-compressor 0.14 is right: it
#   takes the experts apart first.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0 \
    bitsandbytes==0.50.2 torchao==0.18.0 optimum-quanto==0.2.7
fi
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - "$dir/model" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import sys

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import BitsAndBytesConfig, QuantoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM, TorchAoConfig

folder = sys.argv[1]
torch.manual_seed(0)
Qwen3MoeForCausalLM(
    Qwen3MoeConfig(vocab_size=256, hidden_size=256, moe_intermediate_size=256, num_hidden_layers=2, head_dim=64,
                   num_attention_heads=4, num_key_value_heads=4, num_experts=8, num_experts_per_tok=2)
).bfloat16().save_pretrained(folder)  # fmt: skip


def load(config=None):
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu", quantization_config=config)


def quantised_by_torchao():
    model = load()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def stored(tensor):
    """Bytes of a tensor, or of the tensors that a quantised one is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(stored(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.untyped_storage().nbytes()


def is_quantised(parameter):
    return type(parameter) is not torch.nn.Parameter


whole = sum(stored(parameter) for parameter in load().parameters())
ways = {
    "bitsandbytes, 4 bits": lambda: load(BitsAndBytesConfig(load_in_4bit=True)),
    "bitsandbytes, 8 bits": lambda: load(BitsAndBytesConfig(load_in_8bit=True)),
    "torchao, 8 bits, from_pretrained": lambda: load(TorchAoConfig(Int8WeightOnlyConfig())),
    "torchao, 8 bits, quantize_": quantised_by_torchao,
    "quanto, 8 bits": lambda: load(QuantoConfig(weights="int8")),
}
for name, way in ways.items():
    parameters = dict(way().named_parameters())
    size = sum(stored(parameter) for parameter in parameters.values()) / whole
    attention = [is_quantised(p) for key, p in parameters.items() if "_proj" in key and "self_attn" in key]
    experts = [p for key, p in parameters.items() if "experts" in key]
    untouched = sum(p.dtype == torch.bfloat16 and not is_quantised(p) for p in experts)
    print(f"{name}: {size:.0%} of bf16's bytes; matrices of attention quantised: {sum(attention)} of {len(attention)}; "
          f"tensors of experts still in bf16: {untouched} of {len(experts)}")
    assert len(attention) == 8 and all(attention)
    assert untouched == len(experts) > 0 and size > 0.85, "the behaviour has changed"
PY
