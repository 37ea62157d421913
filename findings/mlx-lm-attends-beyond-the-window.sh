#!/bin/sh
# Question: a model whose layers attend to a sliding window (Mistral 7B, Mixtral, Phi-3, Gemma 2, Qwen3 with
#   use_sliding_window) runs in mlx-lm on a text longer than the window. Are its log-probabilities those of transformers?
# Guess: yes; config.json has the window, and mlx-lm has windowed caches, which it uses for Gemma 3 and others.
# Seen (mlx-lm 0.32.2, mlx 0.32.4 on Linux, transformers 5.23.0, fp32, small random models): up to the window's end they
#   agree to 1e-5; beyond, every layer attends to the whole text, and log-probabilities are 0.3 to 0.6 nats off in the mean,
#   up to 3.7. None of these models reads sliding_window, and unknown keys of a config are dropped, so nothing warns.
#   Without a window, all agree. OLMoE's clip_qkv is dropped likewise.
# Hurts: texts longer than the window: the model sees distances that it was never trained on, scores differ from those of
#   transformers and vLLM, and the cache grows with the text.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 'mlx[cpu]==0.32.4' mlx-lm==0.32.2 \
    numpy==2.4.6
fi
CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail "$dir/log"; exit 1; }
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model
from transformers import Gemma2Config, MistralConfig, MixtralConfig, OlmoeConfig, Phi3Config, Qwen3Config

WINDOW, TOKENS, VOCABULARY = 16, 64, 256
small = dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
experts = dict(num_experts_per_tok=2)
window = dict(sliding_window=WINDOW)
cases = {  # without and with the option
    "Mistral": (MistralConfig, dict(sliding_window=None), window),
    "Mixtral": (MixtralConfig, experts | dict(num_local_experts=4), window),
    "Phi-3": (Phi3Config, {}, window),
    "Gemma 2": (Gemma2Config, dict(head_dim=32, sliding_window=4 * TOKENS, query_pre_attn_scalar=32), window),
    "Qwen3": (Qwen3Config, dict(head_dim=32), window | dict(use_sliding_window=True, max_window_layers=1)),
    "OLMoE with clip_qkv": (OlmoeConfig, experts | dict(num_experts=4), dict(clip_qkv=0.5)),
}
tokens = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def errors(config, folder):
    """The difference of the log-probabilities at each position, its mean over the vocabulary and its maximum."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(3)
    right = model(tokens).logits[0].log_softmax(-1).numpy()
    model.save_pretrained(folder)
    loaded, _ = load_model(Path(folder))
    logits = torch.tensor(np.array(loaded(mx.array(tokens.numpy()))[0].astype(mx.float32)))
    error = np.abs(logits.log_softmax(-1).numpy() - right)
    return error.mean(1), error.max(1)


for name, (kind, without, option) in cases.items():
    plain, _ = errors(kind(**small | without), f"{sys.argv[1]}/{name}")
    mean, largest = errors(kind(**small | without | option), f"{sys.argv[1]}/{name} with")
    print(f"{name}: without the option {plain.mean():.5f} nats off; with it, within {WINDOW} tokens "
          f"{mean[:WINDOW].mean():.5f}, beyond {mean[WINDOW:].mean():.3f}, at most {largest[WINDOW:].max():.1f}")
    assert plain.max() < 1e-3
    assert "clip" in name or mean[:WINDOW].max() < 1e-3
    assert mean[WINDOW:].mean() > 0.05, "the behaviour has changed"
PY
