#!/bin/sh
# Question: LoRA also trains the embedding of a model whose head is tied with it (small models of Gemma, Qwen3, SmolLM).
#   ensure_weight_tying=True is set, so that both share one adapter. Is the merged model the trained one?
# Guess: yes; the setting is there for that. The adapter is trained as one for both, and saved and loaded rightly.
# Seen (peft 0.21.2, transformers 5.24.0, CPU): no. The merge visits embedding and head, which share the weights and the
#   adapter: the update is added to the shared weights twice. All logits are wrong, for embed_tokens, lm_head or both as
#   targets; the error is about as large as all that the adapter changed. Without tied weights, the merge is right. PEFT
#   warns at the merge that tied targets "can lead to complications", and not that the update counts twice.
# Hurts: whoever trains new tokens or another language by LoRA on a small model and merges it: a model that is damaged, or
#   that has learned too much. Subtract the update once, or keep the adapter.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import sys
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
for tied in (False, True):
    for targets in (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "q_proj"]):
        folder = f"{sys.argv[1]}/{tied} {targets}"
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                             num_attention_heads=4, tie_word_embeddings=tied)  # fmt: skip
        llama = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for weight in llama.parameters():
                weight.normal_(0, 0.2) if weight.dim() > 1 else None
        llama.save_pretrained(folder)
        with warnings.catch_warnings(record=True) as messages, torch.no_grad():
            warnings.simplefilter("always")
            before, base = llama(tokens).logits, llama.get_input_embeddings().weight.clone()
            lora = LoraConfig(r=4, target_modules=targets, ensure_weight_tying=tied)
            model = get_peft_model(llama, lora).eval()
            for weight in model.parameters():  # as if it had been trained
                weight.add_(0.1 * torch.randn_like(weight)) if weight.requires_grad else None
            wanted = model(tokens).logits
            model.save_pretrained(folder + "/adapter")
            loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), folder + "/adapter").eval()
            assert torch.allclose(loaded(tokens).logits, wanted, atol=1e-3)
            layer = loaded.get_input_embeddings()
            update = layer.get_delta_weight("default") if hasattr(layer, "get_delta_weight") else None
            merged = loaded.merge_and_unload()
            seen, change = merged(tokens).logits, merged.get_input_embeddings().weight - base
        told = [str(text.message)[:110] for text in messages if "tie" in str(text.message)]
        error = float((seen - wanted).abs().mean() / (wanted - before).abs().mean())
        times = "" if update is None else f", the embedding has its update {float((change / update).median()):.2f} times"
        print(f"tied {tied}, {targets}: error of the merged model {error:.0%} of what the adapter changes{times}; {told}")
        assert error > 0.2 if tied else error < 1e-3, "the behaviour has changed"
PY
