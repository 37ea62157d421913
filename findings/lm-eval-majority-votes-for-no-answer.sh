#!/bin/sh
# Question: lm-eval's gsm8k_cot_self_consistency samples several answers to a question and takes the one that most of
#   them give (maj@8). Some samples are cut off before they give an answer. How do these vote?
# Guess: not at all. The vote is among the answers that were found.
# Seen (lm_eval 0.4.13): for "[invalid]", which is what the regular expression gives where it finds nothing. With three
#   samples cut off, two right and three different wrong ones, the answer is "[invalid]", and counts as wrong. If 40% of the
#   samples give no answer, 35% the right one and 25% one of 20 wrong ones, maj@8 scores 42%, and a vote among the answers
#   that were found 87%. Answers vote as strings, although the score ignores commas: "1,000" and "1000" divide their votes.
# Hurts: models with long reasoning, and runs with a small max_gen_toks, whose maj@8 and maj@64 look as if
#   self-consistency hardly helped. Own tasks with the filters regex and majority_vote are the same.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile lm_eval==0.4.13
fi
HF_HOME="$dir/cache" "$PYTHON" -W ignore - <<'PY'
import collections
import importlib.metadata
import pathlib
import random

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.filters import build_filter_ensemble

task = pathlib.Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k-cot-self-consistency.yaml"
filters = next(entry["filter"] for entry in yaml.safe_load(task.read_text())["filter_list"] if entry["name"] == "maj@8")
steps = [[step["function"], {key: step[key] for key in step if key != "function"} or None] for step in filters]
CUT = "She has 5 bags of 3 apples each, so that"


def vote(samples):
    instance = Instance(request_type="generate_until", doc={}, arguments=("", {}), idx=0)
    instance.resps = list(samples)
    build_filter_ensemble("maj@8", steps).apply([instance])
    return instance.filtered_resps["maj@8"]


def says(number):
    return f"She has 5 bags. The answer is {number}."


generator = random.Random(0)
scores = collections.Counter()
for _ in range(1000):
    samples = []
    for _ in range(8):
        kind = generator.choices(["cut", "right", "wrong"], [40, 35, 25])[0]
        samples.append({"cut": CUT, "right": says(15), "wrong": says(generator.randrange(100, 120))}[kind])
    scores["lm-eval"] += vote(samples) == "15"
    found = collections.Counter(sample for sample in samples if sample != CUT)
    scores["among the answers found"] += bool(found) and found.most_common(1)[0][0] == says(15)
print("lm_eval", importlib.metadata.version("lm_eval"), {name: f"{score / 1000:.1%}" for name, score in scores.items()})
cut = vote([CUT] * 3 + [says(15), says(15), says(1), says(2), says(3)])
divided = vote([says("1,000"), says("1,000"), says("1000"), says("1000"), says(7), says(7), says(7), says(8)])
print("three cut off, two right:", cut, "- two 1,000, two 1000, three 7:", divided)
assert vote([CUT, says(15), says(15), says(1), says(2), says(3), says(4), says(5)]) == "15"
assert cut == "[invalid]" and divided == "7", "the behaviour has changed"
assert scores["lm-eval"] < scores["among the answers found"] - 200, "the behaviour has changed"
PY
