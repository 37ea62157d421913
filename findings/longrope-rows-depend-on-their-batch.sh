#!/bin/sh
# Question: a model has RoPE of the kind "longrope" (as Phi-3) or "dynamic". A row of 40 tokens is padded on the right
#   to 100, beside a row of 100 tokens. Are its logits those that it has alone?
# Guess: yes. Attention is causal, so neither padding nor other rows of a batch change anything.
# Seen (transformers 5.23.0): no. The frequencies of the whole batch depend on its longest row: beyond
#   original_max_position_embeddings (for dynamic: max_position_embeddings; both 64 below), all rows get those for long
#   contexts. With random weights, the logits change by 100% and 47% of their own size. With the default kind of RoPE,
#   they do not change.
# Hurts: evaluations in batches: the scores of short rows depend on the batch size, on the order of rows, and on which
#   long row is beside them. Compare models with the same batches, or one row at a time.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
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
from transformers.utils import logging

logging.set_verbosity_error()
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
longrope = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 4.0}
kinds = {
    "default": (256, {}),
    "longrope": (256, {**longrope, "original_max_position_embeddings": 64}),
    "dynamic": (64, {"factor": 2.0}),
}


def change(kind):
    """How much the logits of 40 tokens change beside a row of 70 or 100, relative to their size."""
    length, options = kinds[kind]
    rope = {"rope_type": kind, "rope_theta": 10000.0, **options}
    torch.manual_seed(0)
    # Larger weights than at initialisation: attention depends on positions, as after training.
    config = LlamaConfig(
        **sizes, num_attention_heads=2, max_position_embeddings=length, rope_parameters=rope, initializer_range=0.2
    )
    model = LlamaForCausalLM(config).eval()
    rows = torch.randint(0, 64, (2, 100))
    with torch.no_grad():
        alone = model(rows[:1, :40]).logits[0]
        beside = [model(rows[:, :longest]).logits[0, :40] for longest in (60, 100)]
    changes = [((logits - alone).norm() / alone.norm()).item() for logits in beside]
    print(f"{kind}: logits of 40 tokens change by {changes[0]:.1%} in a batch of length 60, "
          f"by {changes[1]:.1%} in one of 100")
    return changes


seen = {kind: change(kind) for kind in kinds}
assert max(seen["default"]) < 1e-4 and max(changes[0] for changes in seen.values()) < 1e-4
assert min(seen["longrope"][1], seen["dynamic"][1]) > 0.1, "the behaviour has changed"
PY
