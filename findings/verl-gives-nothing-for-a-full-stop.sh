#!/bin/sh
# Question: verl's reward for GSM8K, compute_score(text, "18") with method "strict" (the default, for "#### 18") or
#   "flexible" (the last number of the text). What does "The answer is 18." get in the flexible mode, and "#### 18." in
#   the strict one?
# Guess: 1. The full stop is no part of the number; "flexible" accepts what people write.
# Seen (verl 0.9.1): 0 for both. The pattern for a number takes dots and commas at its end along, and "18." is compared
#   with "18" as text. So each number that ends a sentence is wrong in the flexible mode, where it is the usual case, and
#   so is "1,800", since only the strict mode removes commas. "18.00", and "$18" in the strict mode, get 0 as well. Both
#   modes look at the last 300 characters only; an answer with a longer remark behind it gets 0. "18 dollars" is right.
# Hurts: reinforcement learning on GSM8K and its kind: right answers are punished for their full stop, and the model is
#   trained to end without one; validation accuracies, which use the same function, are too low.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile --no-deps verl==0.9.1
fi
"$PYTHON" - <<'PY'
import importlib.metadata
import importlib.util

distribution = importlib.metadata.distribution("verl")
print("verl", distribution.version)
# The file itself needs no other package; importing verl would need many.
path = distribution.locate_file("verl/utils/reward_score/gsm8k.py")
spec = importlib.util.spec_from_file_location("gsm8k", path)
gsm8k = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gsm8k)

LONG = " I hope that this helps, and I am happy to explain each of the steps in more detail if there are any questions." * 3
CASES = (  # the model's text, the right answer, the scores in both modes
    ("#### 18", "18", 1, 1),
    ("#### 18 dollars", "18", 1, 1),
    ("#### 17", "18", 0, 0),
    ("The answer is 18", "18", 0, 1),
    ("#### 18.", "18", 0, 0),
    ("The answer is 18.", "18", 0, 0),
    ("The answer is $18.", "18", 0, 0),
    ("#### 18.00", "18", 0, 0),
    ("#### $18", "18", 0, 1),
    ("#### 1,800", "1800", 1, 0),
    ("#### 18" + LONG, "18", 0, 0),
)
for text, right, strict, flexible in CASES:
    seen = [gsm8k.compute_score(text, right, method=method) for method in ("strict", "flexible")]
    shown = text if len(text) < 40 else f"{text[:20]}… ({len(text)} characters)"
    print(f"{shown!r} for {right}: strict {seen[0]:.0f}, flexible {seen[1]:.0f}")
    assert seen == [strict, flexible], "the behaviour has changed"
PY
