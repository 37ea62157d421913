#!/bin/sh
# Question: a tokenizer is trained with BPE dropout, models.BPE(dropout=0.1), which drops merges at random, and saved.
#   Does AutoTokenizer drop merges as well, when the model is evaluated or generates?
# Guess: no. Dropout is for training, and its paper tokenizes without it at inference.
# Seen (tokenizers 0.23.3, transformers 5.23.0): yes. The rate is part of tokenizer.json, and a tokenizer has no mode of
#   evaluation. The same text has different tokens at each call, and no seed makes them the same. To score with all
#   merges, set tokenizer.backend_tokenizer.model.dropout = None.
# Hurts: scores and losses of models trained with BPE dropout: texts have more tokens, prompts change from call to call,
#   and two evaluations of one checkpoint differ. Cached datasets keep the tokens of the one pass that made them.
# Packages: to use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile tokenizers==0.23.3 transformers==5.23.0
fi
"$PYTHON" - "$dir" <<'PY'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

text = "The quick brown fox jumps over the lazy dog and runs through the forest to the other side of the river."
tokenizer = Tokenizer(models.BPE(dropout=0.1))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
tokenizer.train_from_iterator([text] * 50, trainer)
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(sys.argv[1])
loaded = AutoTokenizer.from_pretrained(sys.argv[1])
calls = [loaded(text).input_ids for _ in range(20)]
assert all(loaded.decode(ids) == text for ids in calls)
print("numbers of tokens in 20 calls:", [len(ids) for ids in calls])
loaded.backend_tokenizer.model.dropout = None
whole = [loaded(text).input_ids for _ in range(20)]
print("with dropout = None:", {len(ids) for ids in whole})
assert len({tuple(ids) for ids in whole}) == 1
assert len({tuple(ids) for ids in calls}) > 10, "the behaviour has changed"
PY
