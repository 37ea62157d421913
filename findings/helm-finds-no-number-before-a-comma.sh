#!/bin/sh
# Question: HELM Lite scores GSM8K by final_number_exact_match, which "returns 1 iff the final number in gold and pred
#   match". 15 is right. What does a model get for "The answer is 15 eggs, as shown above.", or for "The answer is
#   $15.00."?
# Guess: 1 in both cases: the last number of the text is found, and compared as a number. The documentation has "The answer
#   is 15 eggs." as its example.
# Seen (crfm-helm 0.5.16): 0 in both. A number is found by a pattern in which a lone comma is a number too, so after any
#   later comma the final "number" is the empty text. The pattern's decimal point is any character: "14 15" and "7:15" are
#   one number each. What is found is compared as text, so that 15.00 and 15.0 are not 15. With a comma or full stop right
#   after the number, and with commas for thousands, it is right.
# Hurts: the scores of models that end their answer with a sentence, or that write dollars with cents, beside those that
#   copy the style of the examples. A right calculation is counted as wrong, so models are compared by their style.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  # the whole of HELM needs many large packages; its metrics need these
  "$PYTHON" -m pip install --quiet --no-compile nltk==3.10.4 rouge-score==0.1.2 filelock==4.3.1 zstandard==0.25.0 \
    pyhocon==0.3.63 pyyaml==6.0.4 colorlog==6.12.0 sqlitedict==2.1.0 retrying==1.4.2 mako==1.4.3 dacite==1.9.2 \
    cattrs==26.2.1 datasets==5.2.0 numpy==2.4.6
  "$PYTHON" -m pip install --quiet --no-compile --no-deps crfm-helm==0.5.16
fi
"$PYTHON" - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
from pathlib import Path

import helm.benchmark
import yaml
from helm.benchmark.metrics.evaluate_reference_metrics import final_number_exact_match

schema = yaml.safe_load((Path(helm.benchmark.__file__).parent / "static" / "schema_lite.yaml").read_text())
gsm8k = next(group for group in schema["run_groups"] if group["name"] == "gsm")
assert gsm8k["environment"]["main_name"] == "final_number_exact_match"
gold = "Janet sells 5 trays of 3 eggs each. 5 * 3 = 15. The answer is 15."  # as HELM writes GSM8K's solutions
answers = {
    "The answer is 15.": 1,
    "The answer is 15 eggs.": 1,
    "The answer is 15, I think.": 1,
    "The answer is 15 eggs, as shown above.": 0,
    "5 trays hold 15 eggs, so Janet sells all of them.": 0,
    "The answer is $15.00.": 0,
    "The answer is 15.0.": 0,
    "On the last two days: 14 15": 0,
    "She sells the last one at 7:15": 0,
    "The answer is 14.": 0,
}
for answer, expected in answers.items():
    score = final_number_exact_match(gold, answer)
    print(f"{score} for {answer!r}")
    assert score == expected, "the behaviour has changed"
thousand = final_number_exact_match("The answer is 1,200.", "The answer is 1200.")
print(f"{thousand} for 1200, where 1,200 is right")
assert thousand == 1
PY
