#!/bin/sh
# Question: a Llama's config.json has `sliding_window` (as one converted from Mistral may keep it).
#   transformers' Llama has no sliding window. Does the key change anything?
# Guess: no. Llama does not read it: the logits of a whole text are those without the key.
# Seen (torch 2.13.0, transformers 5.23.0 and 5.24.0, SDPA and eager): the logits of a whole text are the same, but
#   `generate` gives other text as soon as a prompt and its continuation are longer than the window. The cache reads
#   the key and keeps only so many tokens. `generate(use_cache=False)` gives the right text. There is no warning.
# Hurts: long generations and chats with such checkpoints: they depend on the last tokens alone, while losses,
#   perplexities and multiple-choice scores are those of full attention.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0
fi
"$PYTHON" - <<'PY'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

shape = {  # of a Llama
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": None,
}
print(f"transformers {transformers.__version__}")
prompt = torch.randint(1, 97, (1, 12), generator=torch.Generator().manual_seed(0))
text = torch.randint(1, 97, (1, 64), generator=torch.Generator().manual_seed(1))
for attention in ("sdpa", "eager"):
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation=attention)).eval()
    with_key = LlamaForCausalLM(LlamaConfig(**shape, sliding_window=8, attn_implementation=attention)).eval()
    with_key.load_state_dict(plain.state_dict())
    with torch.no_grad():
        difference = (plain(text).logits - with_key(text).logits).abs().max().item()

    def generated(model, **options):
        return model.generate(prompt, max_new_tokens=12, do_sample=False, **options)[0, 12:].tolist()

    expected, seen, uncached = generated(plain), generated(with_key), generated(with_key, use_cache=False)
    print(f"{attention}: the logits of 64 tokens differ by {difference}")
    print(f"  generate without the key:           {expected}")
    print(f"  with sliding_window=8:              {seen}")
    print(f"  with sliding_window=8, no cache:    {uncached}")
    assert difference == 0 and uncached == expected and seen != expected, "the behaviour has changed"
PY
