#!/bin/sh
# Question: transformers 5.24 renames `past_key_values`, and Mamba's `cache_params`, to `cache`, and outputs answer to all
#   three names, with a message that the old ones are deprecated. Does a loop that works with Llama, model(token,
#   past_key_values=out.past_key_values), work with Mamba?
# Guess: yes, as the message says; or Mamba refuses the argument. Up to 5.23, its output has no `past_key_values`, so such
#   a loop stops with an AttributeError.
# Seen (torch 2.13.0, transformers 5.24.0): no. Mamba, Mamba-2 and Falcon Mamba take the argument and drop it, so that the
#   model knows nothing but the last token. Nothing is said of that. Llama does the same to `cache_params`. `cache` is right
#   for all.
# Hurts: loops, scores and servers for any model, which read the cache's old name from the output: text and perplexities
#   of Mamba are those of a model without memory, after an update that turned an error into a deprecation.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0
fi
"$PYTHON" -W ignore - <<'PY'
import torch
import transformers
from transformers import AutoModelForCausalLM, FalconMambaConfig, LlamaConfig, Mamba2Config, MambaConfig

transformers.logging.set_verbosity_error()  # kernels that are not installed; deprecated names
base = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": None}
configs = {
    "Llama": LlamaConfig(**base, num_attention_heads=4, intermediate_size=96),
    "Mamba": MambaConfig(**base, state_size=8),
    "Mamba-2": Mamba2Config(**base, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=8),
    "Falcon Mamba": FalconMambaConfig(**base, state_size=8),
}
text = torch.randint(2, 97, (1, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def off(model, name):
    """Largest error of the last logits, in standard deviations, if the cache is read and passed on by `name`."""
    expected = model(text, use_cache=False).logits[:, -1]
    out = model(text[:, :20], use_cache=True)
    for i in range(20, 40):
        out = model(text[:, i : i + 1], use_cache=True, **{name: getattr(out, name)})
    return float((out.logits[:, -1] - expected).abs().max() / expected.std())


@torch.no_grad()
def last_token_only(model):
    """The same error, if the model has read nothing but the last token."""
    expected = model(text, use_cache=False).logits[:, -1]
    return float((model(text[:, -1:]).logits[:, -1] - expected).abs().max() / expected.std())


print(f"transformers {transformers.__version__}: errors of the last logits, in standard deviations")
for model_name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
    errors = {name: off(model, name) for name in ("cache", "past_key_values", "cache_params")}
    alone = last_token_only(model)
    print(f"{model_name:12}", *(f"{name} {error:.5f}," for name, error in errors.items()), f"last token alone {alone:.5f}")
    ignored = "cache_params" if model_name == "Llama" else "past_key_values"
    for name, error in errors.items():
        assert error < 1e-3 or name == ignored, "wrong with the right name"
    assert abs(errors[ignored] - alone) < 1e-3, "the behaviour has changed"
PY
