#!/bin/sh
# Question: load_dataset("json") reads rows {"question": "When did it open?", "answer": "2024-05-01"}, all answers being
#   dates. What does row["answer"] hold, and what does a prompt made from it say?
# Guess: the string "2024-05-01", as json.loads gives it. JSON has no dates.
# Seen (datasets 5.2.0, pyarrow 26.0.1): a datetime, and the prompt says "2024-05-01 00:00:00". A column whose strings
#   all look like ISO dates or times becomes timestamp[s], streamed or not. If one row has another text ("in May"), all
#   are strings, so a subset can have another type than its whole. features with Value("string") do not help: the
#   answers are strings then, but still end with " 00:00:00". pyarrow's documentation mentions that it looks for times,
#   that of datasets does not. Dataset.from_list(list(map(json.loads, file))) keeps the strings.
# Hurts: benchmarks and fine-tuning data about dates: targets that the model is scored on, or learns to write, have
#   " 00:00:00" at the end. There is no message.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1
fi
HF_HOME="$dir/cache" "$PYTHON" - "$dir" <<'PY'
import json
import sys

import datasets

datasets.disable_progress_bars()


def targets(name, answers, **options):
    """The answers as a prompt would show them."""
    path = f"{sys.argv[1]}/{name}.jsonl"
    with open(path, "w") as file:
        file.write("\n".join(json.dumps({"question": "When did it open?", "answer": answer}) for answer in answers))
    rows = datasets.load_dataset("json", data_files=path, split="train", **options)
    return [f"{row['answer']}" for row in rows]


dates = ["2024-05-01", "2023-01-31"]
both = datasets.Features({"question": datasets.Value("string"), "answer": datasets.Value("string")})
seen = {
    "dates only": targets("dates", dates),
    "dates only, streamed": targets("dates", dates, streaming=True),
    "with another text": targets("mixed", [*dates, "in May"])[:2],
    "dates only, with features": targets("typed", dates, features=both),
}
for name, shown in seen.items():
    print(f"{name}: {shown}")
with open(f"{sys.argv[1]}/dates.jsonl") as file:
    from_list = datasets.Dataset.from_list(list(map(json.loads, file)))
print(f"Dataset.from_list: {from_list['answer'][:]}")
assert seen["with another text"] == from_list["answer"][:] == dates
times = [f"{date} 00:00:00" for date in dates]
assert seen["dates only"] == seen["dates only, streamed"] == times, "the behaviour has changed"
assert seen["dates only, with features"] == times, "the behaviour with features has changed"
PY
