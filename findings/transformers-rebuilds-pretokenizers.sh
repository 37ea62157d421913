#!/bin/sh
# Question: a folder has a tokenizer.json whose pre-tokenizer splits digits one by one before ByteLevel, and a
#   tokenizer_config.json that says GPT2Tokenizer (as many exports do). Does AutoTokenizer give the ids of
#   tokenizer.json?
# Guess: yes. tokenizer.json is the whole tokenizer; the class only adds special tokens.
# Seen (transformers 5.23.0): no. The class GPT2Tokenizer(Fast) builds its own ByteLevel pre-tokenizer and drops the
#   splitting of digits. "in 2024" becomes `in Ġ2024`, while tokenizer.json gives `in Ġ 2 0 2 4`. There is no warning.
#   The classes PreTrainedTokenizerFast and TokenizersBackend keep tokenizer.json.
# Hurts: models trained on the ids of tokenizer.json. They are evaluated and served with other ids; scores fall without
#   an error.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile transformers==5.23.0 tokenizers==0.23.3
fi
"$PYTHON" - "$dir" <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoTokenizer

vocab = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
merges = [("i", "n"), ("2", "0"), ("20", "2"), ("202", "4"), ("Ġ", "2024")]
for pair in merges:
    vocab.setdefault("".join(pair), len(vocab))
own = Tokenizer(models.BPE(vocab, merges))
own.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
own.decoder = decoders.ByteLevel()
seen = {}
for name in ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast"):
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    own.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": name, "eos_token": "!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    seen[name] = AutoTokenizer.from_pretrained(folder).tokenize("in 2024")
    print(f"{name}: {seen[name]}; tokenizer.json: {own.encode('in 2024').tokens}")
assert seen["PreTrainedTokenizerFast"] == own.encode("in 2024").tokens == ["in", "Ġ", *"2024"]
assert seen["GPT2Tokenizer"] == seen["GPT2TokenizerFast"] == ["in", "Ġ2024"], "it has changed"
PY
