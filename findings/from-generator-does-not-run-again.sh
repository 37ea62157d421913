#!/bin/sh
# Question: datasets.Dataset.from_generator(rows) makes a dataset from a generator that reads a file. The file changes,
#   and the program runs again. Which rows does the dataset have?
# Guess: the new ones. A generator is code, and from_generator runs it.
# Seen (datasets 5.2.0): the old ones. The generator is not run again: the result is cached under a hash of the
#   generator's code and of gen_kwargs, and what the generator reads is not part of it. There is no message.
#   load_dataset("json", data_files=…) of the same file has the new rows.
# Hurts: corpora that grow or are corrected, with an own reader: the program trains on the data of its first run, on
#   this machine only. Put a version or the file's time into gen_kwargs.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datasets==5.2.0
fi
cat > "$dir/program.py" <<'PY'
import sys

import datasets

datasets.disable_progress_bars()


def rows(path):
    with open(path) as file:
        for line in file:
            yield {"text": line.strip()}


path = sys.argv[1]
by_generator = datasets.Dataset.from_generator(rows, gen_kwargs={"path": path})
by_load_dataset = datasets.load_dataset("text", data_files=path, split="train")
print(*by_generator["text"], "|", *by_load_dataset["text"])
PY
cat > "$dir/check.py" <<'PY'
import subprocess
import sys

folder, seen = sys.argv[1], []
for rows in ("old1 old2", "new1 new2 new3"):
    with open(f"{folder}/rows.txt", "w") as file:
        file.write("\n".join(rows.split()))
    command = [sys.executable, f"{folder}/program.py", f"{folder}/rows.txt"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    seen.append([part.strip() for part in output.split("|")])
    print(f"the file has {rows}: from_generator gives {seen[-1][0]}, load_dataset gives {seen[-1][1]}", flush=True)
assert seen[0] == ["old1 old2"] * 2 and seen[1][1] == "new1 new2 new3"
assert seen[1][0] == "old1 old2", "the behaviour has changed"
PY
HF_HOME="$dir/cache" "$PYTHON" "$dir/check.py" "$dir"
