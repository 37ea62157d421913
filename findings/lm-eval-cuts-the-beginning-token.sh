#!/bin/sh
# Question: a tokenizer puts <s> before every text, and a few-shot prompt is longer than the model's context. lm-eval
#   drops what does not fit. Does the model still read <s> first?
# Guess: yes. Tokens are dropped from the beginning of the prompt, but the special token stays.
# Seen (lm_eval 0.4.13): no. The prompt loses its first tokens, and <s> is one of them. The windows of
#   loglikelihood_rolling (perplexities of wikitext and others) begin without it too. The first has it twice, and its
#   second <s> is scored as a token of the text.
# Hurts: models that were trained with <s> first (Llama, Gemma, Mistral): many use it as the token that attention rests
#   on. The longest prompts are scored without it, and no message says how many there were.
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

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logging.disable(logging.WARNING)
words = ["<s>", "a", "b", "c", "d", "?"]
own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
own.pre_tokenizer = pre_tokenizers.Whitespace()
own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", unk_token="?")
sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=8))
lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=1)
inputs, call = [], lm._model_call
lm._model_call = lambda ids, **options: inputs.append(ids[0].tolist()) or call(ids, **options)


def read(kind, *arguments):
    """What the model reads, in words; its context has eight tokens."""
    inputs.clear()
    getattr(lm, kind)([Instance(kind, {}, arguments, 0)])
    return [" ".join(words[i] for i in ids) for ids in inputs]


short = read("loglikelihood", "a b", " c d")
long = read("loglikelihood", "a b a b a b a b a b", " c d")
windows = read("loglikelihood_rolling", "a b a b a b a b a b c d a b c d")
print(f"short prompt: {short}\nlong prompt: {long}\nwindows of a text: {windows}")
assert short == ["<s> a b c"] and len(windows) > 1
assert windows[0].startswith("<s> <s> a"), "the behaviour has changed"
assert not any("<s>" in text for text in long + windows[1:]), "the behaviour has changed"
PY
