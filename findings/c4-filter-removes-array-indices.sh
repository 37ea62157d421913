#!/bin/sh
# Question: datatrove's C4QualityFilter keeps or drops documents, by the rules of C4. What happens to a page on programming
#   that it keeps?
# Guess: nothing, or it loses whole lines, those without a full stop at the end.
# Seen (datatrove 0.10.1): its text changes inside of lines. "The first element is a[0] and the last is a[9]." becomes "The
#   first element is a and the last is a.", and "return row[0] + row[1]" becomes "return row + row". "[]" and every number
#   in brackets are removed as citations of Wikipedia (remove_citations=True, as in C4's own code). a[i] and a[-1] stay. The
#   default drops pages with braces, so those with Python, which has few, are the ones that are kept.
# Hurts: pages with code, arrays and matrices, and texts that cite by number, in corpora that pass this filter, as FineWeb
#   did: their code is wrong, but looks like code. Set remove_citations=False where the source is not Wikipedia.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 spacy==3.8.18 tokenizers==0.23.3 numpy==2.4.6 regex
fi
"$PYTHON" - <<'PY'
import importlib.metadata

from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter

text = """The first element of a list is a[0] and the last of ten is a[9].
A new list is made by x = [] or by x = [5] if it has one element.
The product of two matrices begins with m[0][0] * n[0][0].
The element before the last is a[-1] and the next is a[i].
def total(row): return row[0] + row[1]
These five sentences are the whole of this page."""


def filtered(**options):
    document = Document(text=text, id="page")
    assert C4QualityFilter(filter_no_terminal_punct=False, min_num_sentences=-1, **options).filter(document) is True
    return document.text


print("datatrove", importlib.metadata.version("datatrove"), filtered(), sep="\n")
assert filtered(remove_citations=False) == text
lines = filtered().split("\n")
assert lines[0] == "The first element of a list is a and the last of ten is a.", "the behaviour has changed"
assert lines[2] == "The product of two matrices begins with m * n.", "the behaviour has changed"
assert lines[4] == "def total(row): return row + row", "the behaviour has changed"
PY
