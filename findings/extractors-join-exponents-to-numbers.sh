#!/bin/sh
# Question: web pages write 10<sup>6</sup> for a million. What do the extractors make of it whose text FineWeb
#   (trafilatura), DCLM (resiliparse) and Nemotron-CC (jusText) consist of?
# Guess: 10^6, 10⁶ or 10 6, by which a reader can still tell the exponent from the number.
# Seen (trafilatura 2.3.1, resiliparse 2.0.1, jusText 3.0.2): 106. 2<sup>80</sup> becomes 280, a mixed number
#   12<sup>1</sup>/<sub>2</sub> becomes 121/2, and a year with a footnote, 2019<sup>1</sup>, becomes 20191. There is no
#   message, and the text has no trace of it. include_formatting=True or output_format="markdown" of trafilatura keep <sup>;
#   resiliparse's preserve_formatting="minimal_html" does not.
# Hurts: models pretrained on such text, which read wrong numbers in science, mathematics and reference works, and tests of
#   arithmetic on it. Replace <sup> by ^ before the extraction, as below, or keep the formatting.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile trafilatura==2.3.1 Resiliparse==2.0.1 jusText==3.0.2 lxml_html_clean==0.4.6
fi
"$PYTHON" - <<'PY'
import importlib.metadata

import justext
import trafilatura
from resiliparse.extract.html2text import extract_plain_text

rest = "than the number that was known in all of the years before this, which was measured by them with a telescope. " * 3
sentences = [
    "The universe has about 10<sup>6</sup> times as many of them ",
    "A key of this kind is one of 2<sup>80</sup> keys, so that there are more of them ",
    "It is 12<sup>1</sup>/<sub>2</sub> times as far to the next of the stars ",
    "In the year 2019<sup>1</sup> there were more of these stars ",
]
html = "<html><body><article>" + "".join(f"<p>{sentence}{rest}</p>" for sentence in sentences) + "</article></body></html>"


def with_justext(page):
    paragraphs = justext.justext(page, justext.get_stoplist("English"))
    return "\n".join(paragraph.text for paragraph in paragraphs if not paragraph.is_boilerplate)


extractors = {
    "trafilatura": trafilatura.extract,
    "resiliparse": lambda page: extract_plain_text(page, main_content=True),
    "justext": with_justext,
}
for name, extract in extractors.items():
    lines = [line.partition("than")[0] for line in extract(html).split("\n") if "than" in line]
    print(name, importlib.metadata.version(name), *lines, sep="\n  ")
    for number, line in zip(("106 ", "280 ", "121/2 ", "20191 "), lines, strict=True):
        assert number in line, "the behaviour has changed"
    assert "10^6 " in extract(html.replace("<sup>", "^"))
assert "10<sup>6</sup> " in trafilatura.extract(html, output_format="markdown")
assert "106 " in extract_plain_text(html, preserve_formatting="minimal_html")
PY
