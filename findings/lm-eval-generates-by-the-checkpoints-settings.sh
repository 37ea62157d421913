#!/bin/sh
# Question: a checkpoint's generation_config.json has repetition_penalty 1.3, or no_repeat_ngram_size or num_beams.
#   lm-eval scores it on a task with generation (GSM8K and others), greedily: do_sample is false. Do these settings
#   apply?
# Guess: no. The task's generation_kwargs say how to generate, and greedy means the most likely token.
# Seen (lm_eval 0.4.13, transformers 5.23.0): yes. `--model hf` gives generate() the task's settings, and what they do
#   not name comes from the checkpoint's file, without a message. Of the settings below, only temperature and top_k do
#   nothing. The texts differ from the greedy ones after a few tokens.
# Hurts: comparisons on generated answers: chat models are often published with a repetition penalty, which punishes
#   numbers that a calculation needs again; two checkpoints with the same weights get different scores, and so do
#   lm-eval and another harness. Set what matters in the task's generation_kwargs, such as repetition_penalty: 1.0.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 tokenizers==0.23.3 'lm_eval[hf]==0.4.13'
fi
"$PYTHON" - <<'PY'
import logging

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logging.disable(logging.WARNING)
words = {f"w{i}": i for i in range(62)} | {"</s>": 62, "?": 63}
word_level = Tokenizer(models.WordLevel(words, unk_token="?"))
word_level.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, eos_token="</s>", unk_token="?", pad_token="</s>")
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
# Larger weights than at initialisation: the most likely token depends on those before it.
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.2))
task = {"until": ["</s>"], "max_gen_toks": 20, "do_sample": False}


def answer(more=None, **checkpoint):
    """What lm-eval generates if the checkpoint's generation_config.json has these settings."""
    model.generation_config = GenerationConfig(eos_token_id=62, pad_token_id=62, **checkpoint)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1)
    request = Instance("generate_until", {}, ("w1 w2 w3 w4", {**task, **(more or {})}), 0)
    text = lm.generate_until([request], disable_tqdm=True)[0]
    print(f"checkpoint {checkpoint or 'without settings'}, task {more or 'without them'}: {text}")
    return text


greedy = answer()
assert answer(temperature=0.6, top_k=20, do_sample=True) == greedy
assert answer({"repetition_penalty": 1.0}, repetition_penalty=1.3) == greedy
seen = [answer(repetition_penalty=1.3), answer(no_repeat_ngram_size=2), answer(num_beams=4)]
assert greedy not in seen, "the behaviour has changed"
PY
