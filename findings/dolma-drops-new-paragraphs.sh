#!/bin/sh
# Question: dolma removes paragraphs that occurred before, with a Bloom filter, as the data of OLMo were made. The filter is
#   made for estimated_doc_count documents, here the exact number, and a desired_false_positive_rate of 1e-5. Each
#   document has ten paragraphs, and no paragraph occurs twice. How many are removed?
# Guess: none, or a few: 1e-5 of them. If the filter is made for a tenth of the entries, because documents are
#   counted and paragraphs entered, one in a thousand.
# Seen (dolma 1.2.1): 25% of all paragraphs, and 85% of those in the last tenth of the documents. The paragraphs are what is
#   entered, and a filter with ten times its entries has 99.9% of its bits set, so that nearly every new paragraph is
#   taken for an old one. That the size is rounded up to 1 MiB, seven times what is needed, does not help: the number of
#   hash functions grows with it, to 117. There is no message; the log even promises a false positive rate far below 1e-5.
#   With an estimate of ten times the documents, no paragraph is removed.
# Hurts: corpora that are deduplicated by paragraph: the later files lose most of their text, whatever it is. The number to
#   give is that of all paragraphs of all files that share the filter.
# Note: the command `dolma dedupe` passes the same settings to the function that is called here. It is called directly since
#   the command needs many packages more.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile --no-deps dolma==1.2.1
fi
cd "$dir"
"$PYTHON" - <<'PY'
import gzip
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import shutil
from pathlib import Path

DOCUMENTS, PARAGRAPHS = 50_000, 10
package = Path(importlib.util.find_spec("dolma").origin).parent
file = next(package.glob("dolma*.so"))
loader = importlib.machinery.ExtensionFileLoader("dolma", str(file))
dolma = importlib.util.module_from_spec(importlib.util.spec_from_loader("dolma", loader))
loader.exec_module(dolma)

folder = Path("corpus/documents")
folder.mkdir(parents=True)
with gzip.open(folder / "rows.jsonl.gz", "wt", compresslevel=1) as rows:
    for i in range(DOCUMENTS):
        text = "\n".join(f"Paragraph {j} of document {i} says {7919 * i + j}." for j in range(PARAGRAPHS))
        rows.write(json.dumps({"id": str(i), "source": "example", "text": text}) + "\n")


def removed(estimate):
    """Paragraphs of each document that are marked as duplicates."""
    shutil.rmtree("corpus/attributes", ignore_errors=True)
    Path("filter.bin").unlink(missing_ok=True)
    settings = {
        "documents": ["corpus/documents/*.gz"],
        "dedupe": {"name": "seen", "skip_empty": True, "paragraphs": {"attribute_name": "seen"}},
        "bloom_filter": {"file": "filter.bin", "read_only": False, "size_in_bytes": 0, "estimated_doc_count": estimate,
                         "desired_false_positive_rate": 1e-5},
        "work_dir": {"input": "input", "output": "output"},
        "processes": 1,
        "dryrun": False,
    }  # fmt: skip
    dolma.deduper_entrypoint(json.dumps(settings))
    with gzip.open("corpus/attributes/seen/rows.jsonl.gz", "rt") as rows:
        return [len(json.loads(row)["attributes"].get("seen", ())) for row in rows]


print("dolma", importlib.metadata.version("dolma"))
shares = {}
for estimate in (DOCUMENTS, DOCUMENTS * PARAGRAPHS):
    counts = removed(estimate)
    shares[estimate] = sum(counts) / (DOCUMENTS * PARAGRAPHS)
    last = counts[-DOCUMENTS // 10 :]
    print(f"estimated_doc_count {estimate:,}: {shares[estimate]:.2%} of the {DOCUMENTS * PARAGRAPHS:,} new paragraphs are "
          f"removed; of those in the last tenth of the documents {sum(last) / (len(last) * PARAGRAPHS):.2%}")
assert shares[DOCUMENTS] > 0.1, "the behaviour has changed"
assert shares[DOCUMENTS * PARAGRAPHS] < 1e-4
PY
