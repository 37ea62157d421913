#!/bin/sh
# Question: dataset.map(prep.tokenize) has its results cached by a fingerprint of the function. The file prep.py is
#   edited and the program is run again. Is the dataset computed with the new code?
# Guess: yes. The fingerprint hashes the code of the function, wherever it was defined.
# Seen (datasets 5.2.0): no. A function that is imported from a module is hashed by its module and name alone, so the
#   old results are loaded. The same holds for a function that the program's own file defines and that calls the
#   module's. Only an edit in the program's own file changes the fingerprint. There is no warning.
# Hurts: preparation code that lives in a package, as it does in most training repositories. A corrected filter or
#   tokenizer function has no effect: the run trains on the old tokens.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datasets==5.2.0
fi
cd "$dir"
echo '{"text": "a b"}' > rows.jsonl
export HF_HOME="$dir/cache" PYTHONDONTWRITEBYTECODE=1
program() {  # the expression that makes a row's length, in the module and in the program
  printf 'def length(row):\n    return {"length": %s}\n' "$1" > prep.py
  cat > program.py <<PY
import datasets
import prep

datasets.disable_progress_bars()
rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train")


def own(row):
    return {"length": $2}


def calls_module(row):
    return {"length": prep.length(row)["length"]}


print(*(rows.map(function)[0]["length"] for function in (prep.length, calls_module, own)))
PY
  "$PYTHON" program.py
}
before=$(program 'len(row["text"])' 'len(row["text"])')
after=$(program 'len(row["text"].split())' 'len(row["text"].split())')
echo "length of the row by prep.length, by a function that calls it, by one in the program: $before; after the edit: $after"
test "$before" = "3 3 3"
test "$after" = "3 3 2" || { echo "the behaviour has changed"; exit 1; }
