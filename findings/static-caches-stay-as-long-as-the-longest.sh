#!/bin/sh
# Question: `generate(cache_implementation="static")` has made 4 tokens after a prompt of 2,000. How long is the cache
#   of the next call, which makes 4 tokens after a prompt of 16?
# Guess: 19 positions, or some round number above, as with a new model.
# Seen (transformers 5.23.0, torch 2.13.0): 2,003, and so on for the life of the model. Every later token attends to
#   all these positions. On an H100 with transformers 5.17, a Llama of 0.5B (bf16, batch 8, prompt 128) made 4,302
#   tokens/s before a call with a prompt of 2,048, and 3,126 after it. Deleting the attribute
#   `_previous_max_cache_length` of the model helps.
# Hurts: benchmarks that measure long prompts before short ones, and servers that see one long prompt: throughput
#   falls, and memory for keys and values grows by a factor of 100 here, without a warning.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=4096, pad_token_id=0, eos_token_id=None,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()


def length(prompt):
    """Positions of the cache of a call."""
    ids = torch.randint(1, 64, (1, prompt), generator=torch.Generator().manual_seed(0))
    result = model.generate(
        ids, max_new_tokens=4, do_sample=False, cache_implementation="static",
        return_dict_in_generate=True,
    )
    return result.past_key_values.layers[0].keys.shape[2]


seen = [length(16), length(2000), length(16)]
del model._previous_max_cache_length
seen.append(length(16))
print("positions for prompts of 16, 2,000, 16, and 16 without the attribute:", seen)
assert seen[1] == seen[2] > 50 * seen[0] and seen[3] == seen[0], "it has changed"
PY
