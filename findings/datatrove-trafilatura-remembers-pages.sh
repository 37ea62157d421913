#!/bin/sh
# Question: datatrove's Trafilatura extractor, with its defaults, takes the text out of 200 web pages of a site. Half-way
#   down, each page has the same paragraph about the site's method, and all else differs. Which pages keep the paragraph?
# Guess: all. An extractor sees one page at a time, and removing duplicates between pages is the job of a later step.
# Seen (datatrove 0.10.1, trafilatura 2.3.1): the first three, which are the last three if the pages are read in another
#   order. datatrove sets trafilatura's deduplicate=True, which trafilatura itself does not, and which keeps the last 4,096
#   texts of the process: a text that was seen more than twice is dropped from each page after it, if it has over 100
#   characters or so. A whole page that is read ten times gives its text three times and then nothing; datatrove drops empty
#   documents. There is no message, and datatrove's documentation calls it "trafilatura's deduplicate option". Trafilatura's
#   issue 778, from work on FineWeb-2, describes it for a page that is read again.
# Hurts: corpora from Common Crawl: shared passages (licences, definitions, quotations, methods) stay in the first pages of
#   a task and vanish in the middle of others, and how many depends on the number of tasks, since each process begins anew.
#   No count of removed duplicates shows it. Set Trafilatura(deduplicate=False), and remove duplicates in steps of their
#   own.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 trafilatura==2.3.1 lxml-html-clean==0.4.6 \
    orjson==3.13.0 numpy==2.4.6
fi
cat > "$dir/extract.py" <<'PY'
import importlib.metadata

from datatrove.data import Document
from datatrove.pipeline.extractors import Trafilatura

METHOD = ("All of our measurements were made three times, on three days and by three people, and each number is the "
          "median of the three; the raw data of each of them can be had from the authors on request.")


def page(i):
    def paragraph(j):
        return (f"<p>Paragraph {j} of page {i} tells of subject {i * 10 + j}, in a text that is long enough for the "
                f"extractor to take it as a part of the article, and that no other page has in these words.</p>")

    body = f"{paragraph(0)}{paragraph(1)}<p>{METHOD}</p>{paragraph(2)}{paragraph(3)}"
    return f"<html><head><title>Page {i}</title></head><body><article><h1>Page {i}</h1>{body}</article></body></html>"


def extract(numbers, **options):
    """The texts of the pages with these numbers, in one task."""
    documents = [Document(text=page(i), id=str(i)) for i in numbers]
    return {int(document.id): document.text for document in Trafilatura(timeout=60, **options).run(documents)}


if __name__ == "__main__":
    print("datatrove", importlib.metadata.version("datatrove"), "trafilatura", importlib.metadata.version("trafilatura"))
    kept = {}
    for name, tasks, options in (
        ("one task", [range(200)], {}),
        ("one task, in reverse", [range(199, -1, -1)], {}),
        ("four tasks", [range(k, 200, 4) for k in range(4)], {}),
        ("deduplicate=False", [range(200)], {"deduplicate": False}),
    ):
        texts = {}
        for numbers in tasks:
            texts |= extract(numbers, **options)
        kept[name] = sorted(i for i, text in texts.items() if METHOD in text)
        print(f"{name}: {len(texts)} pages, the paragraph is in {len(kept[name])} of them: {kept[name][:12]}")
    repeated = [Document(text=page(0), id=str(i)) for i in range(10)]
    lengths = [len(document.text) for document in Trafilatura(timeout=60).run(repeated)]
    print("one page ten times: lengths of the texts", lengths)
    assert len(kept["deduplicate=False"]) == 200
    assert kept["one task"] == [0, 1, 2] and kept["one task, in reverse"] == [197, 198, 199], "the behaviour has changed"
    assert len(kept["four tasks"]) == 12, "the behaviour with several tasks has changed"
    assert len(lengths) < 10, "the behaviour for repeated pages has changed"
PY
"$PYTHON" -W ignore "$dir/extract.py"
