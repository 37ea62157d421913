#!/bin/sh
# Question: datatrove's NGramsDecontIndexer and NGramsDecontFilter, with their defaults, remove documents that contain
#   questions of a benchmark. One page has a word problem of the benchmark, with its solution; another has "What is the
#   capital of France? Paris". Are they removed?
# Guess: yes. Any twelve words in a row that are in the benchmark too give the page away; short ones are compared whole.
# Seen (datatrove 0.10.1): both pages stay. By default, only sequences of twelve words that reach from the question into
#   the answer, or lie in the answer, are looked for: the last eleven words and "72". A page that puts "Answer:", a
#   solution or "The answer is" between them is kept, whatever it copies, and so is one with the question alone.
#   find_query_ngrams=True finds these, but a question and answer of fewer than twelve words together have no sequence at
#   all and are never found, in either mode. The indexer writes the number of hashes to the log, 0 for such a question.
# Hurts: corpora that count as decontaminated, and the scores of models that were trained on them: trivia and short
#   questions stay entirely, word problems wherever the solution stands between question and result.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 xxhash==3.6.0 spacy==3.8.18 regex==2026.11.19 numpy==2.4.6
fi
"$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import importlib.metadata
import sys
from pathlib import Path

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer

print("datatrove", importlib.metadata.version("datatrove"))
NGramsDecontIndexer._requires_dependencies = []  # lighteval only fetches benchmarks
QUESTIONS = {
    "word problem": (
        "A library lent 48 books on Monday, and on Tuesday it lent half as many as on the day before. "
        "How many books did the library lend on Monday and Tuesday together?",
        "72",
    ),
    "trivia": ("What is the capital of France?", "Paris"),
}
PAGES = {
    "question and answer": "{question} {answer}",
    "question alone": "{question}",
    "with a solution": "{question} First we add both days, as the text says. The answer is {answer}.",
    "with a label": "Question: {question}\nAnswer: {answer}",
}
kept = {}
for mode in (False, True):
    config = NGramsDecontConfig(find_query_ngrams=mode)
    for name, (question, answer) in QUESTIONS.items():
        folder = Path(sys.argv[1]) / f"{name}-{mode}"
        folder.mkdir()
        hashes = NGramsDecontIndexer(str(folder), config=config).compute_hashes(answer, question)
        np.array(hashes, config.hash_config.np_descr).tofile(folder / "task.index.hashes")
        decontaminate = NGramsDecontFilter(str(folder), config=config)
        documents = {page: Document(text.format(question=question, answer=answer), page) for page, text in PAGES.items()}
        kept[name, mode] = [page for page, document in documents.items() if decontaminate.filter(document) is True]
        print(f"{name}, find_query_ngrams={mode}: {len(hashes)} hashes; kept are the pages {kept[name, mode]}")
assert kept["word problem", True] == []
assert kept["word problem", False] == list(PAGES)[1:], "the default has changed"
assert kept["trivia", False] == kept["trivia", True] == list(PAGES), "short questions have changed"
PY
