#!/bin/sh
# Question: a Llama, Mistral or Qwen2 model is saved by transformers 5, which stores the base and the scaling of RoPE as
#   "rope_parameters" in config.json. mlx-lm loads the folder. Are its log-probabilities those of transformers?
# Guess: yes, to 1e-4 in fp32, or mlx-lm says that a key of the config is unknown or missing.
# Seen (mlx-lm 0.32.2, mlx 0.32.4 on Linux, transformers 5.23.0): only if the base is mlx-lm's default, 10,000 for Llama
#   and Mistral, 1,000,000 for Qwen2. Every other base and every scaling are dropped, without a message; Qwen3 is right.
#   A random Llama with base 500,000 is off by more than 2 nats within 100 tokens. Models of the Hub that were saved by
#   transformers 4 have "rope_theta" and "rope_scaling", and are right.
# Hurts: models that were trained or fine-tuned with transformers 5 and are served or evaluated by mlx-lm, also after its
#   conversion and quantisation: texts start well and get worse. Write rope_theta and rope_scaling into config.json too.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.23.0 torch==2.13.0
fi
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1 "$PYTHON" - "$dir" <<'PY'
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model

mx.set_default_device(mx.cpu)
torch.manual_seed(0)
tokens = torch.randint(0, 32, (1, 100))
folder = Path(sys.argv[1]) / "model"


def difference(kind, rope, old_keys=False):
    """The largest difference of the log-probabilities of transformers and mlx-lm, in nats."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rope_parameters=rope, **sizes
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 6
    model.save_pretrained(folder)
    if old_keys:
        config = json.loads((folder / "config.json").read_text())
        config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        (folder / "config.json").write_text(json.dumps(config))
    other, _ = load_model(folder)
    logits = torch.tensor(np.array(other(mx.array(tokens.numpy())).astype(mx.float32)))
    with torch.no_grad():
        return (logits.log_softmax(-1) - model(tokens).logits.log_softmax(-1)).abs().max().item()


seen = {}
for kind in ("Llama", "Mistral", "Qwen2", "Qwen3"):
    for base in (1e4, 5e5, 1e6):
        seen[kind, base] = difference(kind, {"rope_type": "default", "rope_theta": base})
        print(f"{kind}, base {base:,.0f}: log-probabilities differ by up to {seen[kind, base]:.1e}")
linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
for rope in (linear, {"rope_type": "default", "rope_theta": 5e5}):
    plain, old_keys = (difference("Llama", rope, old_keys) for old_keys in (False, True))
    print(f"Llama, {rope}: {plain:.1e}; with rope_theta and rope_scaling in config.json as well: {old_keys:.1e}")
    assert old_keys < 1e-4 and plain > 0.1, "the behaviour has changed"
right = {("Llama", 1e4), ("Mistral", 1e4), ("Qwen2", 1e6), ("Qwen3", 1e4), ("Qwen3", 5e5), ("Qwen3", 1e6)}
for case, error in seen.items():
    assert (error < 1e-4) == (case in right) and (error > 0.1) == (case not in right), f"the behaviour has changed: {case}"
PY
