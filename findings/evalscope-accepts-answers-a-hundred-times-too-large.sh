#!/bin/sh
# Question: EvalScope scores GSM8K, AIME and MATH-500 with the metric acc(numeric=True). The right answer is 5, and the
#   model says 500; it is 12345, and the model says 12346. Are these right?
# Guess: no. Numbers have to be equal, at most up to rounding.
# Seen (evalscope 1.12.0): both count as right. The metric calls math_equal with its defaults: an answer may also be a
#   hundred times or a hundredth of the right one, in case that is a percentage, though no percent sign is there, and
#   numbers are equal within 0.01%. So 0.05 and 500 are right for 5, 1,800 is right for 18, and 123451 for 123456. The
#   benchmark's page says that the metric "extracts numerical values for accuracy comparison".
# Hurts: accuracies of units (cents for euros, percent for shares, metres for centimetres), which are among the most
#   common mistakes in GSM8K, and of large whole numbers; rewards in reinforcement learning.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile evalscope==1.12.0
fi
HOME="$dir" "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import importlib.metadata

from evalscope.api.registry import BENCHMARK_REGISTRY, get_metric
from evalscope.benchmarks.gsm8k import gsm8k_adapter  # noqa: F401

print("evalscope", importlib.metadata.version("evalscope"))
metric = get_metric("acc")(numeric=True)
CASES = (  # the right answer, the model's, what the metric says
    ("5", "5.0", 1),
    ("5", "6", 0),
    ("5", "15", 0),
    ("5", "5000", 0),
    ("5", "500", 1),
    ("5", "0.05", 1),
    ("18", "1,800", 1),
    ("12345", "12346", 1),
    ("123456", "123451", 1),
)
for right, answer, says in CASES:
    (score,) = metric.apply([answer], [right])
    print(f"{answer} for {right}: {score}")
    assert score == says, "the behaviour has changed"
names = [name for name, meta in BENCHMARK_REGISTRY.items() if {"accuracy": {"numeric": True}} in (meta.metric_list or [])]
print(f"{len(names)} of {len(BENCHMARK_REGISTRY)} benchmarks have this metric:", ", ".join(sorted(names)))
assert {"aime24", "gsm8k", "math_500"} <= set(names), "the benchmarks have another metric"
PY
