#!/bin/sh
# Question: EvalScope's extract_answer reads the answer out of a model's text for GSM8K, AIME, MATH-500 and others. The
#   text ends with "The answer is 18 dollars.", "The answer is **18**." or "The answer is 18." and a further sentence. The
#   right answer is 18. What is the score?
# Guess: 1 for all three. The number behind "the answer is" is taken, as in other harnesses.
# Seen (evalscope 1.12.0): 0 for all three. All text behind "answer is" is the answer, without its spaces: "18dollars",
#   "**18**" and "18Shesellstherest". If a base model goes on with another question, that is part of the answer too. Only
#   a text without these words has its last number taken, so that "She makes $18 every day." is right. "#### 18", "ANSWER:
#   18" and \boxed{18}, for which the prompt asks, are right too. There is no message.
# Hurts: accuracies of models that do not follow the format: base models, small ones, and chat models that write the
#   answer in bold: right answers in common words count as wrong, and the ranking measures the format.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile evalscope==1.12.0
fi
HOME="$dir" "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import importlib.metadata

from evalscope.api.registry import get_metric
from evalscope.metrics.math.parser import extract_answer

print("evalscope", importlib.metadata.version("evalscope"))
metric = get_metric("acc")(numeric=True)
CASES = (  # a model's text, whether it counts as right where 18 is
    (r"So she makes \boxed{18} dollars.", 1),
    ("9 * 2 = 18\n#### 18", 1),
    ("The answer is 18.", 1),
    ("The answer is $18.", 1),
    ("She makes $18 every day.", 1),
    ("The answer is 18 dollars.", 0),
    ("The answer is **18**.", 0),
    ("The final answer is 18 dollars per day.", 0),
    ("The answer is 18. She sells the rest.", 0),
    ("The answer is 18.\n\nQuestion: Another farmer has 5 sheep.", 0),
)
for text, right in CASES:
    answer = extract_answer(text)
    (score,) = metric.apply([answer], ["18"])
    print(f"{text!r}: the answer is read as {answer!r}, score {score}")
    assert score == right, "the behaviour has changed"
PY
