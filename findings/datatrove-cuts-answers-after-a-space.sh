#!/bin/sh
# Question: datatrove's DocumentTokenizer(save_loss_metadata=True) masks the loss of the prompt of "PROMPT ANSWER", given
#   as metadata no_loss_ranges=[(0, len(prompt))], in characters. Which tokens are written, and which have a loss?
# Guess: all are written, and those of the answer have a loss.
# Seen (datatrove 0.10.1, tokenizers 0.23.3): so only if the space between belongs to a token. The range ends at the
#   space, and where the tokenizer gives spaces to no token, char_to_token is None, which is read as "the range goes to
#   the end of the document": the answer is not written. Here nothing is left of the document at all. A range that
#   begins at such a space masks everything from the start of the document. Spaces belong to no token with
#   processors.ByteLevel(), whose default trims offsets, and with the pre-tokenizers Whitespace and BertPreTokenizer; they
#   do with ByteLevel(trim_offsets=False) and Metaspace. An eos_token replaces the post-processor, so with ByteLevel it
#   also decides. Ranges that end after the space are right with all of these.
# Hurts: pairs of prompts and answers: all answers are lost, and the token counts are the only sign.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 tokenizers==0.23.3 numpy==2.4.6
fi
"$PYTHON" - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import sys
from pathlib import Path

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

dir = Path(sys.argv[1])
prompt, answer = "what is the capital of France", " Paris is"


def tokenizer(kind):
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind.startswith("ByteLevel"):
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.post_processor = processors.ByteLevel(trim_offsets="trimmed" in kind)
    elif kind == "Metaspace":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        made.pre_tokenizer = getattr(pre_tokenizers, kind)()
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<eos>"], show_progress=False)
    made.train_from_iterator([prompt + answer] * 9, trainer)
    made.save(f"{dir}/{kind}.json")
    return made


def written(kind, ranges, eos):
    folder = dir / f"{kind}{eos}{ranges}"
    document = Document(text=prompt + answer, id="0", metadata={"no_loss_ranges": ranges})
    options = {"eos_token": eos, "save_loss_metadata": True, "shuffle_documents": False}
    DocumentTokenizer(str(folder), f"{dir}/{kind}.json", **options).run(iter([document]))
    (file,) = folder.glob("*.ds")
    ids, loss = np.fromfile(file, np.uint16), np.fromfile(f"{file}.loss", bool)
    return [made.decode(part.tolist()).strip() for part in (ids, ids[loss])]


for kind in ("ByteLevel", "ByteLevel, trimmed", "Metaspace", "Whitespace", "BertPreTokenizer"):
    made = tokenizer(kind)
    for eos in (None, "<eos>"):
        all_of_it, with_loss = written(kind, [(0, len(prompt))], eos)
        print(f"{kind}, eos_token={eos}: writes {all_of_it!r}, loss on {with_loss!r}")
        lost = kind in ("Whitespace", "BertPreTokenizer") or (kind == "ByteLevel, trimmed" and eos is None)
        expected = ["", ""] if lost else [prompt + answer, answer.strip()]
        assert [all_of_it, with_loss] == expected, "the behaviour has changed"
        assert written(kind, [(0, len(prompt) + 1)], eos) == [prompt + answer, answer.strip()]
made = tokenizer("Whitespace")
paris = (len(prompt), len(prompt) + 7)
_, with_loss = written("Whitespace", [paris], None)
print(f"Whitespace, only {(prompt + answer)[slice(*paris)]!r} masked: loss on {with_loss!r}")
assert with_loss == "is", "the behaviour has changed"
PY
