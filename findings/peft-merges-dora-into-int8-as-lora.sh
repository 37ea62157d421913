#!/bin/sh
# Question: a model in 8 bits by torchao (TorchAoConfig) was fine-tuned with DoRA, which is LoRA with a trained magnitude
#   for each row of a matrix. The adapter is merged: model.merge_and_unload(). Is the result the fine-tuned model, up to the
#   rounding of the weights?
# Guess: yes, or it is refused. PEFT merges plain LoRA into these weights rightly, by quantising them anew, and refuses what
#   it cannot do with them (lora_bias, merging of IA3, LoHa, …).
# Seen (peft 0.21.2, torchao 0.18.0, transformers 5.24.0, CPU): LoRA is merged to 5%. Of DoRA, only the LoRA part is: the
#   trained magnitudes, and the division by the length of the new rows, are left out. Here, a third of what the adapter
#   changed is wrong. In full precision, the merge is exact. There is no message.
# Hurts: merged models are worse than they were with the adapter, and the adapter is gone unless it was saved. Merge into
#   the model in full precision.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 \
    torchao==0.18.0 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

torch.manual_seed(0)
tokens = torch.randint(0, 64, (2, 16))
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                                     num_attention_heads=4, attention_bias=True, mlp_bias=True))  # fmt: skip
with torch.no_grad():
    for weight in llama.parameters():
        weight.normal_(0, 0.1) if weight.dim() > 1 else None
llama.save_pretrained(sys.argv[1])
weights = {"fp32": None, "int8": Int8WeightOnlyConfig(), "int8, inputs too": Int8DynamicActivationInt8WeightConfig()}
for quantised, config in weights.items():
    for method in ({}, dict(use_dora=True)):
        torch.manual_seed(1)
        config_of_model = TorchAoConfig(config) if config else None
        base = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=config_of_model, dtype=torch.float32)
        with torch.no_grad():
            before = base.eval()(tokens).logits
            model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], **method)).eval()
            for weight in model.parameters():  # as if the adapter had been trained
                weight.add_(0.1 * torch.randn_like(weight)) if weight.requires_grad else None
            tuned = model(tokens).logits
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always")
                merged = model.merge_and_unload()
            error = float((merged(tokens).logits - tuned).abs().mean() / (tuned - before).abs().mean())
        name = ", ".join(method) or "LoRA"
        print(f"{quantised}, {name}: error of the merged model {error:.1%} of what the adapter changes; "
              f"messages: {len(messages)}")
        if method and config:
            assert error > 0.2, "the behaviour has changed"
        else:
            assert error < 0.1
PY
