#!/bin/sh
# Question: generate(stop_strings=["\n\n"]) continues a prompt that ends with "Answer:\n". The model writes a break,
#   and then the answer. Where does it stop?
# Guess: at the first empty line that it writes. The documentation says that stop strings end the generation "if the
#   model outputs them".
# Seen (transformers 5.23.0): after one token, the line break. A stop string is looked for at the end of prompt and
#   answer together, so it may begin in the prompt. With a prompt that ends with "Answer:", the answer is complete. The
#   output is empty after stripping, and there is no message.
# Hurts: evaluations and chat formats whose prompts end with a part of a stop string, such as a line break or a "#":
#   answers are cut off at once, and count as wrong. It depends on the prompt's last characters, so two templates for
#   the same task give different scores.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 tokenizers==0.23.3
fi
"$PYTHON" - <<'PY'
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
by_bytes = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
by_bytes.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_bytes)
sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, eos_token_id=None, bos_token_id=None)).eval()
ANSWER = "\nfour\n\nQuestion: 3 + 3\n"


class Writes(LogitsProcessor):
    """Stands for a trained model: its most likely tokens are those of ANSWER."""

    def __init__(self, prompt_length):
        self.prompt_length, self.ids = prompt_length, tokenizer.encode(ANSWER)

    def __call__(self, ids, scores):
        scores = torch.full_like(scores, -1e4)
        scores[:, self.ids[ids.shape[1] - self.prompt_length]] = 0
        return scores


def answer(prompt, stop):
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    options = {"max_new_tokens": len(ANSWER), "do_sample": False, "logits_processor": [Writes(ids.shape[1])]}
    output = model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **options)
    return tokenizer.decode(output[0, ids.shape[1] :])


seen = {}
for prompt in ("Question: 2 + 2\nAnswer:", "Question: 2 + 2\nAnswer:\n"):
    seen[prompt] = answer(prompt, "\n\n")
    print(f"prompt {prompt!r}: the model would write {ANSWER!r}, and generates {seen[prompt]!r}")
first, second = seen.values()
assert first == "\nfour\n\n"
assert second == "\n", "the behaviour has changed"
PY
