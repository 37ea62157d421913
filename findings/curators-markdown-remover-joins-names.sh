#!/bin/sh
# Question: NeMo Curator's MarkdownRemover "removes Markdown formatting in a document including bold, italic, underline,
#   and URL text". What happens to a page with learning_rate_max, self.__init__, 2*3*4, x * y * z and a block of code?
# Guess: they stay. (For self.__init__ and 2*3*4 outside of code, this was wrong of the guess: Markdown marks them as
#   well. In code, it marks nothing, nor by _ within a word, nor by * between spaces.)
# Seen (nemo-curator 1.4.0): learningratemax, self.init, 234 and x  y  z, also in code. All pairs of * or _ in a line go,
#   wherever they stand. f(*args, **kwargs) becomes f(args, *kwargs), a_i + b_i becomes ai + bi, and "* 3 * 4 apples" in a
#   list loses both. Of a link, [the paper](https://…), the address stays and the text goes.
# Hurts: pages with code and mathematics, whose text is wrong afterwards but looks right, and texts with links, which lose
#   words of their sentences.
# Packages: NeMo Curator needs many large ones; its modifiers need these.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile "ray[default]==2.60.0" pandas==3.1.1 pyarrow==26.0.1 loguru==0.7.3 \
    regex==2026.11.19
  "$PYTHON" -m pip install --quiet --no-compile --no-deps nemo-curator==1.4.0 cosmos-xenna==0.2.0
fi
"$PYTHON" - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import pandas
from nemo_curator.stages.text.modifiers import MarkdownRemover, Modify
from nemo_curator.tasks import DocumentBatch

lines = {  # line, what is left of it
    "**bold** and *italic*": "bold and italic",
    "learning_rate_max = 0.1": "learningratemax = 0.1",
    "2*3*4 = 24": "234 = 24",
    "```python": "```python",
    "self.__init__(x * y * z)": "self.init(x  y  z)",
    "f(*args, **kwargs)": "f(args, *kwargs)",
    "```": "```",
    "a_i + b_i": "ai + bi",
    "* 3 * 4 apples": " 3  4 apples",
    "see [the paper](https://example.com/x)": "see https://example.com/x",
}
batch = DocumentBatch(dataset_name="pages", data=pandas.DataFrame({"text": ["\n".join(lines)]}))
result = Modify(MarkdownRemover()).process(batch).to_pandas()["text"][0].split("\n")
for line, seen in zip(lines, result, strict=True):
    print(f"{line!r} becomes {seen!r}")
assert result == list(lines.values()), "the behaviour has changed"
PY
