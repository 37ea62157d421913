#!/bin/sh
# Question: mergekit-extract-lora turns a fine-tuned model into a LoRA adapter of its base model. All of its weights were
#   trained; the rank is as large as the matrices, so that nothing has to be cut. Do base and adapter give that model?
# Guess: yes. What cannot be decomposed (norms, embeddings, the router) is saved as it is, and so it is for Llama.
# Seen (mergekit 0.1.5, peft 0.21.2, transformers 5.23.0, CPU): for Llama and Gemma 2, yes. For Mixtral and
#   Qwen3-MoE, the changes of all experts are missing, since transformers 5 stacks experts in parameters that are no linear
#   layers; only attention, norms, router and embeddings are extracted. For Qwen2 and Phi, the changes of biases are lost:
#   the file has them (lora_B.bias), but its config has lora_bias=false, with which PEFT leaves them out. There is no
#   message in either case.
# Hurts: whoever stores or shares a fine-tune as an adapter: of a mixture of experts, half of the change is lost here, and
#   of Qwen2 a seventh. Compare the outputs before the fine-tuned weights are deleted.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2 mergekit==0.1.5
fi
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import subprocess
import sys

import torch
from peft import PeftModel
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

VOCABULARY = 64
words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0")
shape = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
cases = {  # the model and whether the adapter is complete
    "Llama": (LlamaConfig(**shape), True),
    "Gemma 2": (Gemma2Config(**shape, head_dim=8), True),
    "Mixtral": (MixtralConfig(**shape, num_local_experts=4), False),
    "Qwen3-MoE": (Qwen3MoeConfig(**shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24), False),
    "Qwen2": (Qwen2Config(**shape), False),
    "Phi": (PhiConfig(**shape), False),
}
tokens = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
for name, (config, complete) in cases.items():
    base, tuned, adapter = (f"{sys.argv[1]}/{name} {part}" for part in ("base", "tuned", "adapter"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for folder, change in ((base, 0.2), (tuned, 0.05)):
            for weight in model.parameters():
                weight.add_(change * torch.randn_like(weight))
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    command = [sys.executable, "-m", "mergekit.scripts.extract_lora", "--model", tuned, "--base-model", base]
    run = subprocess.run([*command, "--out-path", adapter, "--max-rank", "64"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with safe_open(adapter + "/adapter_model.safetensors", "pt") as file:
        keys = list(file.keys())
    load = AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        before, wanted = load(base)(tokens).logits, load(tuned)(tokens).logits
        seen = PeftModel.from_pretrained(load(base), adapter).eval()(tokens).logits
    lost = float((seen - wanted).abs().mean() / (wanted - before).abs().mean())
    print(f"{name}: error {lost:.0%} of what the fine-tuning changed; the adapter has {len(keys)} tensors, of experts "
          f"{sum('experts' in key for key in keys)}, of biases {sum('lora_B.bias' in key for key in keys)}")
    assert lost < 1e-3 if complete else lost > 0.05, "the behaviour has changed"
PY
