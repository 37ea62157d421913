#!/bin/sh
# Question: LoRA with init_lora_weights="olora" begins with the base model: what the adapter adds is taken out of the
#   weights first. GPT-2 is trained with it; its matrices are Conv1D, which store weights transposed (fan_in_fan_out=True).
#   What does the model compute before the first step?
# Guess: what it computed without the adapter, as Llama with OLoRA does, and GPT-2 with PiSSA or plain LoRA.
# Seen (peft 0.21.2, transformers 5.24.0, CPU): with the square attn.c_proj as target, another function: the QR
#   decomposition is made of the transposed weights, and what it takes out is not what the adapter adds. The logits are off
#   by 0.7 of their spread at the start, without a message. With matrices that are not square, the first call of the model
#   raises an error about shapes.
# Hurts: fine-tunes of GPT-2 and models like it: they begin from a damaged model and spend steps on its repair.
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
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
tokens = torch.randint(3, 64, (2, 16))
llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                     num_attention_heads=4))  # fmt: skip
gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4))
cases = {  # the model, the matrices, the initialisation, whether the model begins as it was
    "Llama, o_proj, OLoRA": (llama, "o_proj", "olora", True),
    "GPT-2, attn.c_proj, LoRA": (gpt2, "attn.c_proj", True, True),
    "GPT-2, attn.c_proj, PiSSA": (gpt2, "attn.c_proj", "pissa", True),
    "GPT-2, attn.c_proj, OLoRA": (gpt2, "attn.c_proj", "olora", False),
}
for name, (base, target, initialisation, right) in cases.items():
    base = copy.deepcopy(base).eval()
    with torch.no_grad(), warnings.catch_warnings(record=True) as messages:
        for weight in base.parameters():
            weight.normal_(0, 0.15) if weight.dim() > 1 else None
        before = base(tokens).logits
        warnings.simplefilter("always")
        config = LoraConfig(r=4, target_modules=[target], init_lora_weights=initialisation, fan_in_fan_out="GPT" in name)
        seen = get_peft_model(base, config).eval()(tokens).logits
    error = float((seen - before).abs().mean() / before.std())
    told = [str(text.message)[:50] for text in messages if "checkpointing" not in str(text.message)]
    print(f"{name}: error before training {error:.2f} of the logits' spread; messages: {told}")
    assert error < 1e-3 if right else error > 0.1, "the behaviour has changed"
PY
