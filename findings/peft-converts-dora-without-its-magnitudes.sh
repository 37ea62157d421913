#!/bin/sh
# Question: PEFT's convert_to_lora (and save_as_lora) turns an adapter of another kind into plain LoRA, for servers that
#   know nothing else. The adapter is DoRA, or LoRA with biases (lora_bias=True); the rank is as large as the matrices.
#   Does the LoRA adapter give the same outputs?
# Guess: yes, to rounding: for LoHa and LoKr, that is so at full rank. Or it is refused, as for OFT, IA3 and HRA ("do not
#   support LoRA conversion").
# Seen (peft 0.21.2, transformers 5.24.0, CPU): neither. Of DoRA, the LoRA part alone is converted: the trained magnitudes,
#   and the division by the length of the rows, are left out, and so are biases. Here, a third of what DoRA changed and 80%
#   of what LoRA with biases changed is wrong. The only message is that the adapter "is already a LoRA adapter".
# Hurts: whoever serves a DoRA as LoRA: it is another model than the one that was evaluated. (The update of DoRA is a
#   matrix like any other, so that a conversion would be possible: merge the adapter and extract a LoRA from the weights.)
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
from peft import LoHaConfig, LoKrConfig, LoraConfig, convert_to_lora, get_peft_model, set_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
tokens = torch.randint(3, 64, (2, 16))
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=4, attention_bias=True, mlp_bias=True))  # fmt: skip
with torch.no_grad():
    for weight in llama.parameters():
        weight.normal_(0, 0.2) if weight.dim() > 1 else None
targets = dict(target_modules=["q_proj", "down_proj"])
cases = {  # the adapter, whether it is converted rightly
    "LoRA": (LoraConfig(r=4, **targets), True),
    "LoHa": (LoHaConfig(**targets), True),
    "LoKr": (LoKrConfig(**targets), True),
    "DoRA": (LoraConfig(r=4, use_dora=True, **targets), False),
    "LoRA with biases": (LoraConfig(r=4, lora_bias=True, **targets), False),
}
for name, (config, right) in cases.items():
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(llama), config).eval()
    with torch.no_grad():
        before = llama.eval()(tokens).logits
        for weight in model.parameters():  # as if it had been trained
            weight.add_(0.1 * torch.randn_like(weight)) if weight.requires_grad else None
        wanted = model(tokens).logits
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            lora, weights = convert_to_lora(model, rank=32)
        converted = get_peft_model(copy.deepcopy(llama), lora).eval()
        unexpected = set_peft_model_state_dict(converted, weights).unexpected_keys
        seen = converted(tokens).logits
    error = float((seen - wanted).abs().mean() / (wanted - before).abs().mean())
    print(f"{name}: error of the converted adapter {error:.0%} of what the adapter changes; unexpected keys "
          f"{unexpected}, messages {[str(text.message)[:60] for text in messages]}")
    assert error < 1e-3 if right else error > 0.1, "the behaviour has changed"
PY
