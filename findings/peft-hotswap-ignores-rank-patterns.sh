#!/bin/sh
# Question: a server replaces one LoRA adapter by another in place, with PEFT's hotswap_adapter, which is made for that. The
#   new adapter has another rank, or a rank of its own for one kind of matrix (rank_pattern). Is the model the new one's?
# Guess: yes, or it is refused. Another rank or alpha is handled (the scale alpha / r is set anew), and an alpha_pattern,
#   rsLoRA or DoRA that differs is refused: "Configs are incompatible".
# Seen (peft 0.21.2, transformers 5.24.0, CPU): rank_pattern is neither refused nor used. The scale of the new adapter is
#   alpha / r with the general r, also where its rank is another: a matrix of rank 16 in an adapter of r = 4 is scaled 4
#   times too strongly, one of rank 2 half as strongly as it should be. Loaded in the usual way, the same adapter is right.
#   There is no message.
# Hurts: served models after a swap: their answers are not those that the adapter was evaluated with. Adapters with ranks
#   by layer come from pruning ranks, from mergekit-extract-lora, from EVA and from conversions to LoRA.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import copy
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
tokens = torch.randint(3, 64, (2, 16))
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=4))  # fmt: skip
with torch.no_grad():
    for weight in llama.parameters():
        weight.normal_(0, 0.2) if weight.dim() > 1 else None
targets = dict(target_modules=["q_proj", "down_proj"])
cases = {  # the first adapter, the second, whether it is swapped rightly
    "another alpha": (dict(r=8), dict(r=8, lora_alpha=32), True),
    "another rank": (dict(r=8), dict(r=4), True),
    "rank 2 for q_proj": (dict(r=8), dict(r=4, rank_pattern={"q_proj": 2}), False),
    "rank 16 for q_proj": (dict(r=16), dict(r=4, rank_pattern={"q_proj": 16}), False),
}


def trained(name, options, folder):
    torch.manual_seed(len(folder))
    model = get_peft_model(copy.deepcopy(llama), LoraConfig(**targets, **options))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight)) if weight.requires_grad else None
    model.save_pretrained(f"{sys.argv[1]}/{name} {folder}")
    return f"{sys.argv[1]}/{name} {folder}"


for name, (first, second, right) in cases.items():
    first, second = trained(name, first, "first"), trained(name, second, "second")
    with torch.no_grad():
        before = llama.eval()(tokens).logits
        wanted = PeftModel.from_pretrained(copy.deepcopy(llama), second).eval()(tokens).logits
        model = PeftModel.from_pretrained(copy.deepcopy(llama), first).eval()
        hotswap_adapter(model, second, "default")
        seen = model(tokens).logits
        scales = {matrix: getattr(model.base_model.model.model.layers[0], part).get_submodule(matrix).scaling["default"]
                  for part, matrix in (("self_attn", "q_proj"), ("mlp", "down_proj"))}  # fmt: skip
    error = float((seen - wanted).abs().mean() / (wanted - before).abs().mean())
    print(f"{name}: error after the swap {error:.0%} of what the adapter changes; scales {scales}")
    assert error < 1e-3 if right else error > 0.1, "the behaviour has changed"
PY
