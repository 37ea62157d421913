#!/bin/sh
# Question: several questions share a long prompt. Its keys and values are computed once, into a DynamicCache, and
#   model.generate(prompt + question, past_key_values=cache) is called for each. Are the answers those without a cache?
# Guess: yes, or generate refuses a cache that does not belong to its input.
# Seen (transformers 5.23.0): only the first is. generate writes the question and its answer into the cache, and the
#   next call reads its input as a continuation of them, with shifted positions. It checks nothing and says nothing.
#   After cache.crop(-tokens), which removes what the call added, or with copy.deepcopy(cache), as the documentation's
#   example has it, all answers are right.
# Hurts: few-shot and long-context evaluation that share a prefix to save time: all answers but the first are to another
#   text, which often looks plausible, and depend on the order of the questions.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import warnings

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.2)).eval()
prompt = torch.randint(3, 64, (1, 40))
questions = [torch.cat([prompt, torch.randint(3, 64, (1, length))], 1) for length in (3, 8, 12, 50)]
options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def answers(cache, crop):
    right = []
    for question in questions:
        alone = model.generate(question, **options)
        shared = model.generate(question, past_key_values=cache, **options)
        right.append(torch.equal(alone, shared))
        if crop:
            cache.crop(prompt.shape[1] - cache.get_seq_length())
    return right


seen = {}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    for crop in (False, True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt, past_key_values=cache, use_cache=True)
        seen[crop] = answers(cache, crop)
        print(f"answers as without a cache, {'cropped' if crop else 'not cropped'} after each: {seen[crop]}")
assert seen[True] == [True] * 4
assert seen[False] == [True, False, False, False], "the behaviour has changed"
PY
