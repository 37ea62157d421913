#!/bin/sh
# Question: a Llama of transformers gets a boolean mask of shape (batch, 1, tokens, tokens), which keeps packed documents
#   apart and the future hidden. Its logits are right with SDPA. Are they with attn_implementation="eager"?
# Guess: yes, or it is refused. The implementations differ in speed.
# Seen (transformers 5.23.0, torch 2.13.0): no. Eager attention adds the mask to the scores, so True is 1 and False is 0.
#   Nothing is hidden, neither the other document nor the future: every token attends to all, with a little less weight
#   for what the mask excludes. A float mask of ones and zeros does the same in both implementations, and one of integers
#   in eager attention. The additive form, 0 and -inf, is right everywhere. There is no message.
# Hurts: whoever changes to eager attention to see attention weights, for models without SDPA, or to check another
#   implementation: trained so, a model reads the token that it has to predict, and its loss falls near zero.
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

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
torch.manual_seed(0)
ids = torch.randint(64, (1, 10))
keep = torch.ones(10, 10, dtype=torch.bool).tril()
keep[5:, :5] = False  # two documents of five tokens
positions = torch.arange(5).repeat(2)[None]
masks = {"boolean": keep, "float of 1 and 0": keep.float(), "additive": torch.zeros(10, 10).masked_fill(~keep, -torch.inf)}
changed = ids.clone()
changed[0, 9] = (changed[0, 9] + 1) % 64  # the last token, which is in the future of all others
seen = {}
for implementation in ("sdpa", "eager"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=implementation, initializer_range=0.3)).eval()
    for name, mask in masks.items():
        with torch.no_grad():
            packed, other = (
                model(batch, attention_mask=mask[None, None], position_ids=positions, use_cache=False).logits
                for batch in (ids, changed)
            )
            alone = model(ids[:, 5:]).logits
        error = ((packed[:, 5:] - alone).norm() / alone.norm()).item()
        future = ((packed - other)[:, :9].norm() / packed[:, :9].norm()).item()
        seen[implementation, name] = error, future
        print(f"{implementation}, {name} mask: second document {error:.0%} off, the future changes logits by {future:.0%}")
right = [("sdpa", "boolean"), ("sdpa", "additive"), ("eager", "additive")]
assert all(max(seen[case]) < 1e-4 for case in right)
assert min(seen["eager", "boolean"]) > 0.05, "the behaviour has changed"
assert min(seen["sdpa", "float of 1 and 0"]) > 0.05, "the behaviour has changed"
PY
