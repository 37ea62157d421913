#!/bin/sh
# Question: Data-Juicer's remove_table_text_mapper removes tables from web pages. What does it do to a letter, a poem, a
#   recipe and a program?
# Guess: nothing. A table has several rows of at least two columns, with tabs, bars or runs of spaces between them.
# Seen (py-data-juicer 1.6.1): it removes most of them. Two or more lines in a row that have the same number of words,
#   from 2 to 20, are a table; empty lines between them do not count, and a single space divides columns. Of a letter, two
#   paragraphs of five words each go; of a poem, the last two of four lines; of a recipe, three of four steps; of a
#   program, four of eight lines. The documentation names the range of columns, but not that a word is a column.
# Hurts: corpora of verse, lists, code, dialogues and short paragraphs: what is left has gaps in its middle, without a
#   message. Look at what it removes before you use it.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile py-data-juicer==1.6.1 aiohttp==3.14.5 ray==2.60.0 scipy==1.17.1 \
    numpy==2.4.6
fi
HF_HOME="$dir" "$PYTHON" -W ignore - <<'PY'
import importlib.metadata

from loguru import logger

logger.remove()
from data_juicer.ops.mapper.remove_table_text_mapper import RemoveTableTextMapper  # noqa: E402

logger.remove()
print("py-data-juicer", importlib.metadata.version("py-data-juicer"))
TEXTS = {  # name: the text, and the numbers of the lines that are left
    "letter": (
        "Dear all,\n\nthe meeting begins at nine.\n\nPlease bring your own notes.\n\nBest regards,\nAnna\n",
        ["Dear all,", "Best regards,", "Anna"],
    ),
    "poem": (
        "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"
        "Rough winds do shake the darling buds of May,\nAnd summer's lease hath all too short a date;\n",
        ["Shall I compare thee to a summer's day?", "Thou art more lovely and more temperate:"],
    ),
    "recipe": (
        "1. Preheat the oven.\n2. Mix the flour.\n3. Add the eggs.\n4. Bake it slowly.\n",
        ["1. Preheat the oven."],
    ),
    "program": (
        "import os\nimport sys\nimport json\n\nx = 1\ny = x + 1\nz = 3\nw = 4\nprint(x, y)\n",
        ["import os", "x = 1", "y = x + 1", "print(x, y)"],
    ),
    "table": ("Prices\n| apple | 1 |\n| pear | 3 |\nEnd.\n", ["Prices", "End."]),
    "prose": (
        "One sentence that is rather long.\nAnother one that is longer than that.\nShort.\n",
        ["One sentence that is rather long.", "Another one that is longer than that.", "Short."],
    ),
}
mapper = RemoveTableTextMapper()
for name, (text, left) in TEXTS.items():
    seen = [line for line in mapper.process_batched({"text": [text]})["text"][0].splitlines() if line]
    print(f"{name}: {len([line for line in text.splitlines() if line])} lines, {len(seen)} are left: {seen}")
    assert seen == left, "the behaviour has changed"
PY
