#!/bin/sh
# Question: a model was loaded with QuantoConfig (weights in 8 or 4 bits, or FP8) and fine-tuned with LoRA. The adapter
#   is merged: model.merge_and_unload(). Is the result the fine-tuned model, up to the rounding of the weights?
# Guess: yes, or PEFT refuses, as it does for some quantised layers, or warns of rounding, as for bitsandbytes.
# Seen (peft 0.21.2, optimum-quanto 0.2.7, transformers 5.24.0, CPU): the result is the base model, bit for bit. PEFT adds
#   the update to weight.data, which for these tensors is a copy; the quantised weights stay as they are, and the adapter
#   is removed. It is so with safe_merge=True and merge_adapter() too. In full precision, the merge is right. There is no
#   message.
# Hurts: whoever merges before saving or serving: the fine-tuning is lost, and if the adapter was not saved, for good.
#   Merge into the model loaded in full precision, and quantise it then.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 \
    optimum-quanto==0.2.7 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, QuantoConfig

torch.manual_seed(0)
tokens = torch.randint(0, 64, (2, 16))
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                                     num_attention_heads=4))  # fmt: skip
with torch.no_grad():
    for weight in llama.parameters():
        weight.normal_(0, 0.1) if weight.dim() > 1 else None
llama.save_pretrained(sys.argv[1])
ways = {
    "merge_and_unload()": lambda model: model.merge_and_unload(),
    "merge_and_unload(safe_merge=True)": lambda model: model.merge_and_unload(safe_merge=True),
    "merge_adapter()": lambda model: model.merge_adapter() or model,
}
for bits in (None, "int8", "int4", "float8"):
    for how, merge in ways.items():
        quantised = QuantoConfig(weights=bits) if bits else None
        base = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=quantised, dtype=torch.float32)
        with torch.no_grad():
            before = base(tokens).logits
            model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])).eval()
            for name, weight in model.named_parameters():
                weight.normal_(0, 0.1) if "lora_B" in name else None  # as if it had been trained
            tuned = model(tokens).logits
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always")
                merged = merge(model)
            after = merged(tokens).logits
        print(f"weights {bits or 'fp32'}, {how}: the adapter changes the logits by {(tuned - before).abs().mean():.3f}; "
              f"after merging, they are {(after - tuned).abs().mean():.3f} from the fine-tuned model's; "
              f"equal to the base model's: {torch.equal(after, before)}; messages: {len(messages)}")
        if bits is None:
            assert (after - tuned).abs().max() < 1e-3
        else:
            assert torch.equal(after, before) and not torch.allclose(tuned, before), "the behaviour has changed"
PY
