#!/bin/sh
# Question: datatrove's PIIFormatter, with its defaults, replaces e-mail addresses and public IP addresses by made ones, as
#   in FineWeb. What does it do to the texts and the code of a corpus that have neither?
# Guess: nothing. "version 4.19.0.12", "section 3.2.1.4" and the product "x@w.T" stay.
# Seen (datatrove 0.10.1): any four numbers up to 255 with dots between them become one of a few addresses, inside of longer
#   ones too: "version 4.19.0.12" becomes "version 22.214.171.124", "torch==2.13.0.5" "torch==126.96.36.199", and the object
#   identifier "1.3.6.1.4.1.311" "220.127.116.11.4.1.311" or the like. A matrix product before an attribute is an e-mail
#   address: "return x@w.T" becomes "return email@example.com". Only numbers of private networks, such as 10.0.0.1, stay.
# Hurts: manuals, standards, changelogs, requirements and numerical code: versions and products are replaced by a few fixed
#   strings, which the model learns in their place. No count tells how often. Set remove_ips=False for such sources, and
#   leave out code.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datatrove==0.10.1 orjson==3.13.0 regex==2026.11.19 numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
import importlib.metadata
import re

from datatrove.data import Document
from datatrove.pipeline.formatters import PIIFormatter

print("datatrove", importlib.metadata.version("datatrove"))
texts = [
    "version 4.19.0.12 of the driver",
    "torch==2.13.0.5",
    "see section 3.2.1.4 of the standard",
    "the object identifier 1.3.6.1.4.1.311",
    "return x@w.T",
    "y = x @ w.T",
    "the host 192.168.0.1",
    "write to jane@example.org",
]
documents = [Document(text=text, id=str(i)) for i, text in enumerate(texts)]
seen = {before: document.text for before, document in zip(texts, PIIFormatter().run(documents))}
for before, after in seen.items():
    print(f"{before!r} -> {after!r}")
assert seen["y = x @ w.T"] == "y = x @ w.T" and seen["the host 192.168.0.1"] == "the host 192.168.0.1"
assert "jane" not in seen["write to jane@example.org"]
for number in ("4.19.0.12", "2.13.0.5", "3.2.1.4", "1.3.6.1"):
    before = next(text for text in texts if number in text)
    address = re.search(r"(\d+)(\.\d+){3}", seen[before]).group()
    assert number not in seen[before] and int(address.split(".")[0]) > 20, "the behaviour has changed"
assert "x@w.T" not in seen["return x@w.T"] and "example." in seen["return x@w.T"], "products are kept now"
PY
