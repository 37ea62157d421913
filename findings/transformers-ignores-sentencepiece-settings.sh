#!/bin/sh
# Question: a model was trained with sentencepiece. Its folder has the tokenizer.model. Does transformers' AutoTokenizer
#   give sentencepiece's ids?
# Guess: yes. The file holds the settings of the tokenizer too: the space before a text, normalisation, white space.
# Seen (transformers 5.23.0): only the pieces and their order are used. The settings are those of the class that is
#   named in tokenizer_config.json or chosen by the model's type. With Llama's own settings, the class LlamaTokenizer is
#   right; without a tokenizer_config.json, a folder of the type "llama" gets another class, which puts no space before
#   the text (transformers 4.57 was right here). LlamaTokenizer gives other ids where sentencepiece's defaults normalise
#   white space, and for every text if the model was trained without the space. There is no message.
# Hurts: own models trained with sentencepiece, and old checkpoints with only a tokenizer.model: their texts are split
#   otherwise than in training, and scores fall without an error. Compare the ids with sentencepiece's.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile transformers==5.23.0 tokenizers==0.23.3 sentencepiece==0.2.3 protobuf
fi
"$PYTHON" - "$dir" <<'PY'
import json
import random
import shutil
import sys
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer

random.seed(0)
folder = Path(sys.argv[1])
letters = "abcdefghijklmnopqrstuvwxyz"
words = ["".join(random.choices(letters, k=random.randint(2, 8))) for _ in range(400)]
lines = [" ".join(random.choices(words, k=12)) for _ in range(3000)]
(folder / "text.txt").write_text("\n".join(lines))
texts = [lines[0], "  ".join(words[:8]), f"{words[0]}\n    {words[1]}"]

llama = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
settings = {"defaults": {}, "Llama's": llama, "no space": llama | {"add_dummy_prefix": False}}
files = {
    "LlamaTokenizer": ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
    "only a config.json": ("config.json", {"model_type": "llama"}),
}
seen = {}
for name, options in settings.items():
    options = {"model_type": "bpe", "vocab_size": 1200, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(input=folder / "text.txt", model_prefix=folder / "own", **options)
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "own.model"))
    for way, (file, content) in files.items():
        place = folder / name / way
        place.mkdir(parents=True)
        shutil.copy(folder / "own.model", place / "tokenizer.model")
        (place / file).write_text(json.dumps(content))
        loaded = AutoTokenizer.from_pretrained(place)
        same = [loaded.encode(text, add_special_tokens=False) == own.encode(text) for text in texts]
        seen[name, way] = same
        print(f"settings: {name}; {way} ({type(loaded).__name__}): same ids for {sum(same)} of {len(texts)} texts")
        if not all(same):
            text = texts[same.index(False)][:24]
            pieces = own.encode(text, out_type=str)
            print(f"    {text!r}: sentencepiece {pieces}, transformers {loaded.tokenize(text)}")
assert all(seen["Llama's", "LlamaTokenizer"])
assert not any(seen["Llama's", "only a config.json"]), "the behaviour of a folder without a class has changed"
assert not any(seen["no space", "LlamaTokenizer"]), "the behaviour without the space has changed"
assert not all(seen["defaults", "LlamaTokenizer"]), "the behaviour has changed"
PY
