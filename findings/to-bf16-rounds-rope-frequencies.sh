#!/bin/sh
# Question: a Llama is converted by model.to(torch.bfloat16), trained or evaluated, saved, and loaded with
#   from_pretrained. Has the loaded model the same logits?
# Guess: yes, to the last bit. All weights are bf16 in both.
# Seen (transformers 5.23.0): no. .to(torch.bfloat16), .bfloat16() and .half() also convert RoPE's frequencies, a buffer
#   that is not saved, and bf16 rounds them by up to 0.4%. from_pretrained(dtype=torch.bfloat16) keeps them in fp32.
#   Angles are frequencies times positions: from position 1,024 on, they differ by a radian and more. With random
#   weights below, logits change by 2% before position 64, and by 71% after 1,024.
# Hurts: runs that convert a model so: they train with other positions than every later evaluation, export and server
#   use. And evaluations that convert a model of fp32. The longer the context, the larger the difference.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
torch.manual_seed(0)
sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
# Larger weights than at initialisation: attention depends on positions, as after training.
config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=4096, initializer_range=0.2)
converted = LlamaForCausalLM(config).to(torch.bfloat16).eval()
converted.save_pretrained(sys.argv[1])
loaded = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
assert all(torch.equal(a, b) and b.dtype == torch.bfloat16 for a, b in zip(converted.parameters(), loaded.parameters()))

tokens, positions = torch.randint(0, 512, (1, 4096)), torch.arange(4096)[None]
with torch.no_grad():
    cosines = [model.model.rotary_emb(torch.zeros(1), positions)[0][0] for model in (converted, loaded)]
    logits = [model(tokens).logits[0].float() for model in (converted, loaded)]
changed = [a - b for a, b in (cosines, logits)]
print("frequencies:", *(model.model.rotary_emb.inv_freq.dtype for model in (converted, loaded)))
for start, stop in ((0, 64), (64, 1024), (1024, 4096)):
    difference = changed[1][start:stop].norm() / logits[1][start:stop].norm()
    print(f"positions {start} to {stop - 1}: cosines differ by up to {changed[0][start:stop].abs().max():.2f}, "
          f"logits by {difference:.1%}")
loaded.model.rotary_emb.inv_freq = converted.model.rotary_emb.inv_freq
with torch.no_grad():
    assert torch.equal(loaded(tokens).logits[0].float(), logits[0])  # nothing else differs
assert changed[0][1024:].abs().max() > 0.5, "the behaviour has changed"
PY
