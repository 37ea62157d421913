#!/bin/sh
# Question: Data-Juicer's clean_links_mapper, with its defaults, removes "links like http/https/ftp". What does it do to
#   text and code without a link?
# Guess: nothing. "If no links are found in a sample, it is left unchanged", as its documentation says.
# Seen (py-data-juicer 1.6.1): any word of two letters or more with a colon and a letter, digit or % after it is a link, of
#   a scheme of that name, up to the next space. Of the line of a log "step:100 loss:2.31 lr:0.0003" nothing is left; "the
#   ratio of men:women is 2:1" becomes "the ratio of  is 2:1", "Question:what is 2+2?" becomes " is 2+2?", "x[start:end]"
#   "x[]", and "default:return 0;" " 0;". So are two names with a dot and a slash: "torch.nn/functional" is removed. With a
#   space after the colon, or a number before it, text stays.
# Hurts: questions, dialogues, logs, code and JSON-like text, from which words vanish in the middle, in corpora that are
#   cleaned by a recipe with clean_links_mapper. Give it a pattern for "https?://" and "www." only.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile py-data-juicer==1.6.1 aiohttp==3.14.5 ray==2.60.0 numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
import importlib.metadata

from loguru import logger

logger.remove()
from data_juicer.ops.mapper.clean_links_mapper import CleanLinksMapper  # noqa: E402

print("py-data-juicer", importlib.metadata.version("py-data-juicer"))
expected = {
    "read https://example.org/page for more": "read  for more",
    "at 12:30, for the 2:1 mix, see: below": "at 12:30, for the 2:1 mix, see: below",
    "step:100 loss:2.31 lr:0.0003": "  ",
    "the ratio of men:women is 2:1": "the ratio of  is 2:1",
    "Question:what is 2+2?": " is 2+2?",
    "x[start:end]": "x[]",
    "default:return 0;": " 0;",
    "the module torch.nn/functional": "the module ",
}
seen = dict(zip(expected, CleanLinksMapper().process_batched({"text": list(expected)})["text"], strict=True))
for before, after in seen.items():
    print(f"{before!r} -> {after!r}")
assert seen == expected, "the behaviour has changed"
PY
