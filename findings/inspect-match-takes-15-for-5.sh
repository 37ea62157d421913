#!/bin/sh
# Question: inspect-ai's scorer match(), with its default settings, compares the end of an answer with the target. The
#   target is "5", and the model ends with "The answer is 15". Or the target is "A", and the answer is "BANANA". What
#   does it say?
# Guess: wrong, in both cases. It compares the last word or number.
# Seen (inspect-ai 0.3.285): correct. It asks whether the text ends with the target, in any case of letters, also within
#   a word or number: random numbers below 100 get 10% instead of 1% where targets have one digit. match(numeric=True)
#   compares numbers and is right there; the letter "A" still matches "BANANA".
# Hurts: scores of tasks with short targets, which are too high, most for weak models that answer at random. Use
#   numeric=True for numbers, location="exact" or a pattern for letters.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile inspect-ai==0.3.285
fi
"$PYTHON" - <<'PY'
import asyncio
import random

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, match
from inspect_ai.solver import TaskState


def correct(scorer, target, answer):
    state = TaskState(
        model="none", sample_id=1, epoch=1, input="", messages=[], output=ModelOutput.from_content("none", answer)
    )
    return asyncio.run(scorer(state, Target(target))).value == "C"


scorers = {"match()": match(), 'location="exact"': match(location="exact"), "numeric=True": match(numeric=True)}
cases = [("5", "The answer is 5."), ("5", "The answer is 15"), ("5", "5"), ("A", "A"), ("A", "BANANA")]
seen = {}
for target, answer in cases:
    seen[target, answer] = {name: correct(scorer, target, answer) for name, scorer in scorers.items()}
    print(f"target {target!r}, answer {answer!r}: correct by", seen[target, answer])
generator = random.Random(0)
questions = [(str(generator.randrange(10)), f"The answer is {generator.randrange(100)}") for _ in range(1000)]
shares = {name: sum(correct(scorers[name], *case) for case in questions) / 1000 for name in ("match()", "numeric=True")}
print("random numbers below 100, targets of one digit:", shares)
assert seen["5", "5"] == dict.fromkeys(scorers, True) and not seen["5", "The answer is 15"]["numeric=True"]
assert seen["5", "The answer is 15"]["match()"] and seen["A", "BANANA"]["match()"], "the behaviour has changed"
assert seen["A", "BANANA"]["numeric=True"] and not seen["A", "BANANA"]['location="exact"']
assert shares["match()"] > 0.08 and shares["numeric=True"] < 0.03
PY
