#!/bin/sh
# Question: datatrove's FineWebQualityFilter keeps a text of 32 sentences, one to a line. Does it keep the same text with
#   Windows line ends (\r\n), with a space at the end of each line, or as a dialogue, with each sentence in quotation marks?
# Guess: yes. None of them changes what the filter measures: lines that end in punctuation, short and repeated lines.
# Seen (datatrove 0.10.1): no, it drops all three, as "line_punct_ratio". A line counts as ended by punctuation only if its
#   very last character is a full stop or the like; \r, a space and a closing quotation mark or bracket are not. Less than
#   12% of such lines is enough to drop a document. Lines that end in the number of a footnote, "[3]", count as unfinished,
#   too. GopherQualityFilter and C4QualityFilter, which strips lines, keep the text with \r\n and with spaces.
# Hurts: corpora by FineWeb's recipe from other sources than trafilatura, which writes \n: books, mail, forums and files
#   from Windows are dropped whole by a character that nobody sees, and novels for their dialogues. The statistics name it a
#   lack of punctuation. Normalise line ends and strip lines first.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 orjson==3.13.0 spacy==3.8.18 nltk==3.10.4 numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
import importlib.metadata

from loguru import logger

logger.remove()
from datatrove.data import Document  # noqa: E402
from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter  # noqa: E402

print("datatrove", importlib.metadata.version("datatrove"))
sentences = [
    "The river rises in the hills and flows through three towns",
    "Its water drives old mills, and boats carried grain along it for two hundred years",
    "In the spring of that year the bridge was built by the people of the valley",
    "They used stone from the quarry, which had been closed since the war",
    "The first train crossed it in May, and the mayor gave a long speech",
    "Nobody could remember what he said, but all of them remembered the cake",
    "Today the bridge is a monument that many visitors come to see",
    "It has been painted four times, and each time in another colour",
]
lines = [f"{sentences[i % 8]}, as the chronicle of the year {1800 + i} tells." for i in range(32)]
texts = {
    "as it is": "\n".join(lines),
    "Windows line ends": "\r\n".join(lines) + "\r\n",
    "a space at the end": "".join(f"{line} \n" for line in lines),
    "in quotation marks": "\n".join(f"“{line}”" for line in lines),
    "with footnotes": "\n".join(f"{line}[{i}]" for i, line in enumerate(lines)),
}
seen = {}
for make in (FineWebQualityFilter, GopherQualityFilter, C4QualityFilter):
    name = make.__name__
    seen[name] = {key: make().filter(Document(text=text, id="0")) for key, text in texts.items()}
    print(f"{name}: {({key: 'kept' if result is True else result[1] for key, result in seen[name].items()})}")
for name, results in seen.items():
    assert results["as it is"] is True
    if name != "FineWebQualityFilter":
        assert results["Windows line ends"] is results["a space at the end"] is True
fineweb = seen["FineWebQualityFilter"]
assert all(fineweb[key] == (False, "line_punct_ratio") for key in texts if key != "as it is"), "the behaviour has changed"
PY
