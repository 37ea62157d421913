#!/bin/sh
# Question: math-verify compares a model's answer with the right one, verify(parse(right), parse(answer)). The answer is
#   "1e6", or "12:30". What does it say?
# Guess: 1e6 equals 1,000,000 and not 1; 12:30 does not equal 12.
# Seen (math-verify 0.9.0): the reverse. Scientific notation is not read: "1e6" is 1, "2.5e-4" is 2.5, and within $…$ the
#   e is Euler's number, so $3e5$ is 15e = 40.8. Of "12:30" the 12 is read. Thousands, "10^6"
#   and "1 \times 10^6" are right.
# Hurts: accuracies in mathematics and science, and rewards in reinforcement learning: right answers in the notation of
#   programs count as wrong, and wrong ones as right: "1e6" is right where 1 was asked for, "3:45" where 3 was.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile math-verify==0.9.0 latex2sympy2_extended==1.11.0
fi
"$PYTHON" - <<'PY'
from math_verify import parse, verify

cases = (  # the right answer, the model's, whether it is right, what math-verify says
    ("$1000000$", "The answer is 1,000,000", True, True),
    ("$1000000$", "The answer is $1 \\times 10^6$", True, True),
    ("$1000000$", "The answer is 1000001", False, False),
    ("$1000000$", "The answer is 1e6", True, False),
    ("$1$", "The answer is 1e6", False, True),
    ("$0.00025$", "The answer is 2.5e-4", True, False),
    ("$2.5$", "The answer is 2.5e-4", False, True),
    ("$300000$", "The answer is $3e5$", True, False),
    ("$12$", "The answer is 12:30", False, True),
)
for right, answer, true, seen in cases:
    verified = verify(parse(right), parse(answer))
    mark = "" if verified == true else "  <- wrong"
    print(f"{right:12} {answer:32} read as {parse(answer)[:1]}: {verified}{mark}")
    assert verified == seen, "the behaviour has changed"
PY
