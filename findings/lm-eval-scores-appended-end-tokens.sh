#!/bin/sh
# Question: a tokenizer's post-processor appends an end token to every text (`$A </s>`). What does lm-eval's `--model
#   hf` score for the continuation " c d" of the context "a b"?
# Guess: the tokens c and d; at most also the end token after them.
# Seen (lm_eval 0.4.13): d and </s>. The context and the whole text are each encoded with the end token, and the
#   continuation is what remains after as many tokens as the context has. So the first token of every answer is dropped,
#   the model reads </s> after the question, and an end token is scored instead.
# Hurts: accuracies of models whose tokenizer appends an end token; there is no error message. For answers of one token,
#   only end tokens are compared.
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
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logging.disable(logging.WARNING)
words = ["</s>", "a", "b", "c", "d", "?"]
sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32))
seen = {}
for template in ("$A", "$A </s>"):
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("</s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", unk_token="?")
    lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1)
    context, continuation = lm._encode_pair("a b", " c d")
    seen[template] = [words[i] for i in context], [words[i] for i in continuation]
    print(f"{template}: context {seen[template][0]}, scored {seen[template][1]}")
assert seen["$A"] == (["a", "b"], ["c", "d"])
assert seen["$A </s>"] == (["a", "b", "</s>"], ["d", "</s>"]), "the behaviour has changed"
PY
