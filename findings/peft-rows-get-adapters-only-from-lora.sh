#!/bin/sh
# Question: a server runs one batch for several users: model(tokens, adapter_names=["a", "b", "__base__"]) of PEFT gives
#   each row its own adapter. The adapters are OFT, IA3, VeRA, … instead of LoRA. Does each row get its adapter?
# Guess: yes, or it is refused, as it is for DoRA ("Cannot pass adapter_names when DoRA is enabled") and for names that
#   were not loaded.
# Seen (peft 0.21.2, transformers 5.24.0, CPU): only with LoRA and RoAd. In the 11 other methods that are shown here,
#   adapter_names is accepted and ignored: every row gets the adapter that is active, also the row for the base model, also
#   in generate(). Unknown names are accepted too. There is no message.
# Hurts: whoever serves or compares several adapters of such a method in one batch: all users get the same one, and an
#   evaluation of adapters against the base model finds them equal.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import copy

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = ["a", "b", "__base__"]
targets = dict(target_modules=["q_proj", "v_proj"])
methods = {
    "LoRA": peft.LoraConfig(**targets),
    "RoAd": peft.RoadConfig(**targets, group_size=16),
    "VeRA": peft.VeraConfig(**targets),
    "IA3": peft.IA3Config(**targets, feedforward_modules=[]),
    "OFT": peft.OFTConfig(**targets, oft_block_size=8),
    "BOFT": peft.BOFTConfig(**targets, boft_block_size=4),
    "LoHa": peft.LoHaConfig(**targets),
    "LoKr": peft.LoKrConfig(**targets),
    "HRA": peft.HRAConfig(**targets),
    "FourierFT": peft.FourierFTConfig(**targets, n_frequency=100),
    "RandLoRA": peft.RandLoraConfig(**targets),
    "DeLoRA": peft.DeloraConfig(**targets),
    "layer norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
}
torch.manual_seed(0)
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=4))  # fmt: skip
with torch.no_grad():
    for weight in llama.parameters():
        weight.normal_(0, 0.3) if weight.dim() > 1 else None
tokens = torch.randint(3, 64, (3, 6))
for method, config in methods.items():
    model = peft.get_peft_model(copy.deepcopy(llama), config, adapter_name="a")
    model.add_adapter("b", copy.deepcopy(config))
    with torch.no_grad():  # as if both adapters had been trained
        for name, weight in model.named_parameters():
            if "base_layer" not in name and any(part in ("a", "b") for part in name.split(".")):
                weight.add_(0.3 * torch.randn_like(weight))
        model.eval()
        wanted = {}
        for name in ("b", "a"):  # a stays active
            model.set_adapter(name)
            wanted[name] = model(tokens).logits
        with model.disable_adapter():
            wanted["__base__"] = model(tokens).logits
        seen = model(tokens, adapter_names=NAMES).logits
    rows = [float((seen[row] - wanted[name][row]).abs().mean()) for row, name in enumerate(NAMES)]
    all_a = torch.equal(seen, wanted["a"])
    print(f"{method}: error of the rows with {NAMES}: {[round(row, 3) for row in rows]}; all have a: {all_a}")
    if method in ("LoRA", "RoAd"):
        assert max(rows) < 1e-4 and not all_a
    else:
        assert all_a and min(rows[1:]) > 0.01, "the behaviour has changed"
print("not known, and accepted:", torch.equal(model(tokens, adapter_names=["x", "y", "z"]).logits, wanted["a"]))
PY
