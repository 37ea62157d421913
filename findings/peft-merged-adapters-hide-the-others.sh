#!/bin/sh
# Question: two adapters are active and add up, model.base_model.set_adapter(["style", "task"]). The first is merged into
#   the weights for speed, model.merge_adapter(["style"]). What does the model apply?
# Guess: both, as before: the style is in the weights, and the task comes on top. merge_adapter takes names for that.
# Seen (peft 0.21.2, transformers 5.24.0, CPU): the style only. While an adapter is merged into a layer, the layer runs its
#   weights alone and skips all adapters that are not merged, though they count as active (model.active_adapters). It is so
#   for each of the eight methods that are shown here. Merging both is right, and unmerging brings both back. There is no
#   message; set_adapter would unmerge first, with a warning.
# Hurts: servers that merge a common adapter, and evaluations of pairs: the second adapter seems to do nothing. Use
#   merge_and_unload(adapter_names=["style"]), and load the other adapter onto the result.
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

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

targets = dict(target_modules=["q_proj", "v_proj"])
methods = {
    "LoRA": peft.LoraConfig(**targets),
    "DoRA": peft.LoraConfig(use_dora=True, **targets),
    "IA3": peft.IA3Config(**targets, feedforward_modules=[]),
    "OFT": peft.OFTConfig(**targets, oft_block_size=8),
    "LoHa": peft.LoHaConfig(**targets),
    "LoKr": peft.LoKrConfig(**targets),
    "HRA": peft.HRAConfig(**targets),
    "VeRA": peft.VeraConfig(**targets),
}
torch.manual_seed(0)
tokens = torch.randint(3, 64, (2, 16))
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=4))  # fmt: skip
with torch.no_grad():
    for weight in llama.parameters():
        weight.normal_(0, 0.2) if weight.dim() > 1 else None
for method, config in methods.items():
    model = peft.get_peft_model(copy.deepcopy(llama), config, adapter_name="style")
    model.add_adapter("task", copy.deepcopy(config))
    with torch.no_grad():  # as if both adapters had been trained
        for name, weight in model.named_parameters():
            if "base_layer" not in name and any(part in ("style", "task") for part in name.split(".")):
                weight.add_(0.2 * torch.randn_like(weight))
        model.eval()
        outputs = {}
        for active in (["task"], ["style"], ["style", "task"]):
            model.base_model.set_adapter(active)
            outputs[" + ".join(active)] = model(tokens).logits
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            model.merge_adapter(["style"])
            seen = model(tokens).logits
        model.unmerge_adapter()
        assert torch.allclose(model(tokens).logits, outputs["style + task"], atol=1e-2)
    distances = {name: round(float((seen - output).abs().mean()), 3) for name, output in outputs.items()}
    print(f"{method}: active {model.active_adapters}, style merged: the logits' distance from those of {distances}; "
          f"messages: {len(messages)}")
    assert distances["style"] < 1e-3 < distances["style + task"], "the behaviour has changed"
PY
