#!/bin/sh
# Question: sentencepiece trains a unigram model of a corpus with num_threads=1, or with 16, its default, or 64. Is the
#   model the same?
# Guess: yes. Threads share the work; the result is a count.
# Seen (sentencepiece 0.2.3): no. Each thread sums its part of the expectations in fp32, and the sums are added, so their
#   rounding depends on the number of threads, and with it the scores and the order of the pieces, which are the ids.
#   Below, models made with 1 and 16 threads have the same 2,000 pieces, and 375 of them have other ids; on larger texts
#   some pieces differ too. With one number of threads, trainings agree. BPE is the same with all.
# Hurts: whoever trains a published tokenizer anew, with the same text and settings, on a machine with more or fewer
#   cores: texts look right, and the ids do not fit the model's weights. Keep the model's file, or fix num_threads.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile sentencepiece==0.2.3
fi
"$PYTHON" - <<'PY'
import argparse
import ast
import asyncio.base_events
import io
import pathlib
import typing

import sentencepiece

modules = (argparse, ast, asyncio.base_events, pathlib, typing)
texts = [pathlib.Path(module.__file__).read_text() for module in modules]
lines = [line for text in texts for line in text.splitlines() if line.strip()]


def pieces(threads, kind):
    file = io.BytesIO()
    options = {"vocab_size": 2000, "model_type": kind, "num_threads": threads, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, **options)
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    return {model.id_to_piece(index): index for index in range(2000)}


seen = {}
for kind in ("unigram", "bpe"):
    one, again = pieces(1, kind), pieces(1, kind)
    assert one == again
    for threads in (2, 16, 64):
        many = pieces(threads, kind)
        assert many == pieces(threads, kind)
        seen[kind, threads] = len(one.keys() - many.keys()), sum(many.get(piece) != one[piece] for piece in one)
        missing, moved = seen[kind, threads]
        print(f"{kind}, 1 and {threads} threads: {missing} pieces differ, {moved} of 2,000 ids")
assert all(value == (0, 0) for (kind, _), value in seen.items() if kind == "bpe")
assert seen["unigram", 16][1] > 100, "the behaviour has changed"
PY
