#!/bin/sh
# Question: torchinfo.summary shows the "Total mult-adds" of a model. What are they for a Llama with 2 rows of 128 tokens?
# Guess: those of its linear layers for 256 tokens; attention, which is not a layer with weights, may be missing.
# Seen (torchinfo 1.8.0, its newest release, torch 2.13.0, transformers 5.23.0): a 95th of that. A linear layer is counted
#   once per row, whatever its number of tokens: 2 rows of 128 tokens cost as much as 2 tokens. The number grows with the
#   batch, so it looks as if inputs were counted. Lookups in the embedding count as products with all of its weights.
#   Convolutions are right, of which the tool was made. The error was reported in 2021, and a correction was merged, but
#   not released.
# Hurts: FLOPs and utilisation of transformers that are taken from this table, and comparisons of FFNs with convolutions.
#   With tokens flattened to one dimension, (tokens, width), linear layers are right.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 torchinfo==1.8.0 numpy==2.4.6
fi
CUDA_VISIBLE_DEVICES= "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
import torchinfo
from transformers import LlamaConfig, LlamaForCausalLM


def mult_adds(model, inputs):
    return torchinfo.summary(model, input_data=inputs, verbose=0).total_mult_adds


rows, length = 2, 128
ffn = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), torch.nn.ReLU(), torch.nn.Linear(256, 64, bias=False))
true = rows * length * 2 * 64 * 256
flat = mult_adds(ffn, torch.zeros(rows * length, 64))
batched = mult_adds(ffn, torch.zeros(rows, length, 64))
print(f"FFN, mult-adds: {flat:,} for ({rows * length}, 64), {batched:,} for ({rows}, {length}, 64); true {true:,}")
assert flat == true and batched * length == true, "the behaviour has changed"

config = LlamaConfig(
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
    tie_word_embeddings=False,
)
llama = LlamaForCausalLM(config)
linear = sum(layer.weight.numel() for layer in llama.modules() if isinstance(layer, torch.nn.Linear))
counts = [mult_adds(llama, torch.zeros(rows, tokens, dtype=torch.long)) for tokens in (1, length)]
true = rows * length * linear
print(f"Llama, mult-adds: {counts[0]:,} for 1 token per row, {counts[1]:,} for {length}; true without attention {true:,}")
assert counts[0] == counts[1] and true / counts[1] > 90, "the behaviour has changed"
convolution = torch.nn.Conv1d(64, 256, 1, bias=False)
assert mult_adds(convolution, torch.zeros(rows, 64, length)) == rows * length * 64 * 256
PY
