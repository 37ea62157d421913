#!/bin/sh
# Question: OpenCompass scores GSM8K by the number in a model's answer, by its default settings (gsm8k_gen), and MATH by its
#   final answer (math_postprocess and math_postprocess_v2). A model writes "The answer is 1,200." or "The final answer is
#   2.5." What is taken?
# Guess: 1200 and 2.5. GSM8K's right answers are written with commas too, and OpenCompass removes those.
# Seen (OpenCompass 0.5.4): 200 and 2. The number is the last run of digits, with a decimal point or without, so a comma
#   ends it: answers from 1,000 on are wrong if the model writes them as the questions and GSM8K's own solutions do. And
#   the text of MATH is split at each full stop before the answer is looked for, so decimals are cut to whole numbers,
#   unless they stand in \boxed{}, for math_postprocess_v2. 2.5 is wrong where 2.5 is right, and 3.9 is right where 3 is.
# Hurts: comparisons of models: those that write thousands with commas, or answers without a box, score lower than they
#   calculate, and some wrong answers count. lm-eval's GSM8K removes the commas.
# Packages: OpenCompass needs many large ones. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 opencompass==0.5.4 pyarrow==20.0.0
fi
cd "$dir"
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
from pathlib import Path

import opencompass
from mmengine.config import Config
from opencompass.datasets.math import MATHEvaluator, math_postprocess, math_postprocess_v2

configs = Path(opencompass.__file__).parent / "configs" / "datasets"
gsm8k = Config.fromfile(str(configs / "gsm8k" / "gsm8k_gen.py")).gsm8k_datasets[0]["eval_cfg"]


def score(evaluator, answer, taken, right):
    points = evaluator.score([taken], [right])["accuracy"]
    print(f"{answer!r}: {taken} is taken; right is {right}; accuracy {points:g}")
    return taken, points


print("GSM8K, default settings")
for answer, solution, expected in (
    ("She sells 3 * 400 = 1200 eggs. The answer is 1200.", "3 * 400 = 1,200 #### 1,200", ("1200", 100)),
    ("She sells 3 * 400 = 1,200 eggs. The answer is 1,200.", "3 * 400 = 1,200 #### 1,200", ("200", 0)),
    ("She sells 3 * 400 = 1,200 eggs. The answer is 1,200.", "6 + 194 = 200 #### 200", ("200", 100)),
):
    taken = gsm8k["pred_postprocessor"]["type"](answer)
    right = gsm8k["dataset_postprocessor"]["type"](solution)
    seen = score(gsm8k["evaluator"]["type"](), answer, taken, right)
    assert seen == expected, "the behaviour has changed"

for postprocess in (math_postprocess, math_postprocess_v2):
    print(f"MATH, {postprocess.__name__}")
    for answer, right, expected in (
        ("Half of 5 is asked. The final answer is 5/2.", "5/2", ("5/2", 100)),
        ("Half of 5 is asked. The final answer is 2.5.", "2.5", ("2", 0)),
        ("We get 3.9 at last. The final answer is 3.9.", "3", ("3", 100)),
    ):
        seen = score(MATHEvaluator(version="v2"), answer, postprocess(answer), right)
        assert seen == expected, "the behaviour has changed"
assert math_postprocess_v2(r"The final answer is \boxed{2.5}.") == "2.5"
PY
