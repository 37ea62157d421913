#!/bin/sh
# Question: calflops, ptflops and thop count the FLOPs of a Llama of transformers with 2,048 tokens. Is attention in it?
# Guess: in ptflops with its backend aten, which counts operators. thop, which counts modules, misses it.
# Seen (calflops 0.3.2, ptflops 0.7.5, thop 0.1.1, fvcore 0.1.5, transformers 5.23.0, torch 2.13.0, CPU): in none of them.
#   They have no formula for torch's scaled_dot_product_attention, by which transformers computes attention. ptflops
#   misses it with both of its backends. Only fvcore says so, in a list of skipped operators. With
#   attn_implementation="eager", calflops, ptflops and fvcore count it, in full squares, twice what causal attention needs.
#   The model below has 84% of its FLOPs there.
# Hurts: FLOPs per token and MFU in tables, budgets at equal FLOPs, and comparisons of long with short contexts: FLOPs per
#   token seem not to depend on the length.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 calflops==0.3.2 \
    ptflops==0.7.5 thop==0.1.1.post2209072238 fvcore==0.1.5.post20221221 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import copy
import logging

import torch
from calflops import calculate_flops
from fvcore.nn import FlopCountAnalysis
from ptflops import get_model_complexity_info
from thop import profile
from transformers import LlamaConfig, LlamaForCausalLM

logging.disable(logging.WARNING)
tokens, hidden, inner, layers, heads, groups, vocab = 2048, 64, 160, 2, 4, 2, 256
config = LlamaConfig(
    vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
    num_attention_heads=heads, num_key_value_heads=groups,
)  # fmt: skip
rows = torch.zeros(1, tokens, dtype=torch.long)
head_size = hidden // heads
per_layer = 2 * hidden * hidden + 2 * hidden * groups * head_size + 3 * hidden * inner
linear = tokens * (layers * per_layer + hidden * vocab)  # multiply-accumulates, as all four tools count
attention = layers * heads * 2 * tokens * tokens * head_size
print(f"linear layers {linear:,}, attention {attention:,} ({attention / (linear + attention):.0%} of both)")


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, rows):
        return self.model(rows, use_cache=False).logits


def by_ptflops(model, backend):
    return get_model_complexity_info(
        model, (tokens,), input_constructor=lambda _: {"input_ids": rows}, as_strings=False,
        print_per_layer_stat=False, backend=backend, verbose=False,
    )[0]  # fmt: skip


def by_fvcore(model):
    analysis = FlopCountAnalysis(Logits(model), rows).tracer_warnings("none")
    return analysis.total()


tools = {
    "calflops": lambda model: calculate_flops(
        model, kwargs={"input_ids": rows}, print_results=False, print_detailed=False, output_as_string=False
    )[1],
    "ptflops, pytorch": lambda model: by_ptflops(model, "pytorch"),
    "ptflops, aten": lambda model: by_ptflops(model, "aten"),
    "thop": lambda model: profile(model, inputs=(rows,), verbose=False)[0],
    "fvcore": by_fvcore,
}
assert LlamaForCausalLM(config).config._attn_implementation == "sdpa"  # the default
seen = {}
for implementation in ("sdpa", "eager"):
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()
    for name, tool in tools.items():
        with torch.no_grad():
            seen[name, implementation] = count = tool(copy.deepcopy(model))
        print(f"{implementation}, {name}: {count:,.0f}, {count / (linear + attention):.0%} of the products")
for name in tools:
    assert abs(seen[name, "sdpa"] / linear - 1) < 0.02, "the behaviour has changed"
    if name != "thop":
        assert abs(seen[name, "eager"] / (linear + attention) - 1) < 0.05
PY
