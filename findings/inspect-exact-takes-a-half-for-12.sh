#!/bin/sh
# Question: inspect-ai's scorer exact() gives a point "when the answer is an exact match to one or more targets", after
#   normalising the text; HELM's quasi_exact_match does so "up to light processing". The target is "-5", "1/2" or "C++".
#   What do they say of "5", "12" and "C"?
# Guess: wrong. Case, spaces, articles and a full stop at the end are normalised, but a minus sign is part of the answer.
# Seen (inspect-ai 0.3.285, crfm-helm 0.5.16): right, in all three cases, by both; f1() gives 1.0. All punctuation is
#   removed wherever it stands, as in the scripts of SQuAD and QuAC, whose answers are words: signs, slashes, powers,
#   operators, and in HELM the decimal point as well, so that 3.14 is 314 (inspect-ai compares such numbers as numbers).
#   Articles are removed too, so that HELM takes "the" for "a": both are empty.
# Hurts: scores of calculations, code and formulas, which are too high, and comparisons of prompts that differ in how
#   often a model forgets a sign. inspect-ai's match(numeric=True, location="exact") compares numbers.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  # the whole of HELM needs many large packages; its metrics need these
  "$PYTHON" -m pip install --quiet --no-compile nltk==3.10.4 rouge-score==0.1.2 filelock==4.3.1 zstandard==0.25.0 \
    pyhocon==0.3.63 pyyaml==6.0.4 colorlog==6.12.0 sqlitedict==2.1.0 retrying==1.4.2 mako==1.4.3 dacite==1.9.2 \
    cattrs==26.2.1 datasets==5.2.0 numpy==2.4.6 inspect-ai==0.3.285
  "$PYTHON" -m pip install --quiet --no-compile --no-deps crfm-helm==0.5.16
fi
"$PYTHON" - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import asyncio

from helm.benchmark.metrics.evaluate_reference_metrics import quasi_exact_match
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, exact, f1, match
from inspect_ai.solver import TaskState


def score(scorer, target, answer):
    output = ModelOutput.from_content("model", answer)
    state = TaskState(model="mockllm/model", sample_id=1, epoch=1, input="question", messages=[], output=output)
    value = asyncio.run(scorer(state, Target(target))).value
    return {"C": 1, "I": 0}.get(value, value)


cases = [  # target, answer, exact(), quasi_exact_match
    ("-5", "5", 1, 1),
    ("1/2", "12", 1, 1),
    ("2^10", "210", 1, 1),
    ("C++", "C", 1, 1),
    ("x+y", "xy", 1, 1),
    ("3.14", "314", 0, 1),
    ("5", "6", 0, 0),
]
for target, answer, *expected in cases:
    by_inspect = score(exact(), target, answer)
    by_helm = quasi_exact_match(target, answer)
    by_f1 = score(f1(), target, answer)
    print(f"target {target!r}, answer {answer!r}: exact() {by_inspect}, f1() {by_f1:g}, quasi_exact_match {by_helm}")
    assert [by_inspect, by_helm] == expected and by_f1 == by_inspect, "the behaviour has changed"
assert quasi_exact_match("a", "the") == 1, "the behaviour has changed"
numeric = [score(match(location="exact", numeric=True), "-5", answer) for answer in ("5", "-5")]
print(f"match(location='exact', numeric=True): target '-5', answers '5' and '-5': {numeric}")
assert numeric == [0, 1]
PY
