#!/bin/sh
# Question: PEFT's add_weighted_adapter mixes LoRA adapters. The adapters are rank-stabilised (use_rslora), DoRA, or have
#   biases (lora_bias). A mix of 1 × first + 0 × second is made. Is it the first?
# Guess: yes, to rounding, for "cat" and "linear", and for "svd" with enough rank; or it is refused, as it is for unequal
#   ranks ("linear"), for heads that both trained and for adapters on parameters.
# Seen (peft 0.21.2, transformers 5.24.0, CPU): for plain LoRA and alpha_pattern only. With use_rslora, the mix is too
#   strong by the square root of its rank (2 times by "linear" of rank 4, 2.8 by "cat", 5.7 by "svd" of rank 32): its
#   matrices are made for a scale of 1, and it gets alpha / sqrt(r). Of DoRA, the mix has the magnitudes of the base model,
#   and biases are left out: a fifth and 62% of what the adapter changes is wrong. There is no message.
# Hurts: mixtures of adapters: they are far too strong, or lack what was trained beside the matrices, which looks as if
#   mixing did not work.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import copy
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
tokens = torch.randint(3, 64, (2, 16))
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=4, attention_bias=True, mlp_bias=True))  # fmt: skip
with torch.no_grad():
    for weight in llama.parameters():
        weight.normal_(0, 0.2) if weight.dim() > 1 else None
    before = llama.eval()(tokens).logits
ways = {"cat": {}, "linear": {}, "svd": dict(svd_rank=32)}
kinds = {  # the adapters' options, and whether the mix is right
    "LoRA": ({}, True),
    "alphas by matrix": (dict(alpha_pattern={"q_proj": 32}), True),
    "rank-stabilised": (dict(use_rslora=True), False),
    "DoRA": (dict(use_dora=True), False),
    "with biases": (dict(lora_bias=True), False),
}
for kind, (options, right) in kinds.items():
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)
    model = get_peft_model(copy.deepcopy(llama), config, adapter_name="first")
    model.add_adapter("second", copy.deepcopy(config))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # as if both had been trained
            weight.add_(0.2 * torch.randn_like(weight)) if "lora_" in name else None
        model.set_adapter("first")
        wanted = model.eval()(tokens).logits
        for way, rank in ways.items():
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always")
                model.add_weighted_adapter(["first", "second"], [1.0, 0.0], way, combination_type=way, **rank)
            model.set_adapter(way)
            error = float((model(tokens).logits - wanted).abs().mean() / (wanted - before).abs().mean())
            update, target = (model.base_model.model.model.layers[0].self_attn.q_proj.get_delta_weight(name)
                              for name in (way, "first"))  # fmt: skip
            print(f"{kind}, {way}: error of 1 × first + 0 × second: {error:.0%} of what the first changes; its q_proj is "
                  f"{float(update.norm() / target.norm()):.2f} times the first's; messages: {len(messages)}")
            assert error < 1e-2 if right else error > 0.1, "the behaviour has changed"
PY
