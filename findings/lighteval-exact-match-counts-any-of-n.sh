#!/bin/sh
# Question: a task of lighteval has two metrics: exact match, and pass@8, for which 8 answers to each question are
#   sampled. One answer is right with a probability of 0.3. What is exact match?
# Guess: 0.3, as it is without the second metric: the first answer is scored, or the mean of all.
# Seen (lighteval 0.13.0): 0.94. All metrics of a task get all 8 answers, and exact match is the maximum over them: a
#   question counts as soon as one answer is right, as in pass@8. F1 and ROUGE take the maximum too. Adding a metric to a
#   task changes the scores of the others, and a larger n makes them better. Nothing in the results tells.
# Hurts: comparisons of scores of the same metric and task, with other lists of metrics or another n. Put metrics of one
#   answer and of several into tasks of their own.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile lighteval==0.13.0
fi
HF_HUB_OFFLINE=1 "$PYTHON" - <<'PY'
import random

import numpy as np
from lighteval.metrics import apply_metric
from lighteval.metrics.metrics import Metrics
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.lighteval_task import LightevalTask, LightevalTaskConfig
from lighteval.tasks.requests import Doc

generator = random.Random(0)
questions = 1000


def prompt(line, task_name):
    return Doc(query="3 + 4 =", choices=["7"], gold_index=0, task_name=task_name)


def score(metrics):
    """Mean scores of answers that are right with a probability of 0.3, as many as the task asks for."""
    task = LightevalTask(LightevalTaskConfig("sums", prompt, "repo", "default", metrics=metrics))
    answers = max(task.num_samples)
    docs = [prompt(None, "sums") for _ in range(questions)]
    responses = [ModelResponse(text=[generator.choices("78", (0.3, 0.7))[0] for _ in range(answers)]) for _ in docs]
    outputs = apply_metric(responses, docs, task.metrics)
    scores = {name: float(np.mean([output[name] for output in outputs])) for name in outputs[0]}
    print(f"{len(metrics)} metrics, {answers} answers to a question: {scores}")
    return scores


alone = score([Metrics.exact_match])
both = score([Metrics.exact_match, Metrics.pass_at_k(sample_params={"k": 8, "n": 8})])
assert abs(alone["em"] - 0.3) < 0.05
assert both["em"] > 0.9, "the behaviour has changed"
PY
