#!/bin/sh
# Question: HELM and lighteval score answers by F1 over words, "in terms of word overlap" and "over the bag of words". The
#   right answer is "Paris", and a model repeats itself: "Paris Paris Paris Paris". What is F1?
# Guess: 0.4, from a precision of 1/4 and a recall of 1, as by the scripts of SQuAD, from which the metric comes.
# Seen (crfm-helm 0.5.16, lighteval 0.13.0): 1.0 in both. The words are sets, so that neither the number of times nor the
#   order of words counts: any number of repetitions is free, a sequence "0 1 1 0" is answered by "0 1", and "1 1 2" by "1
#   2". inspect-ai counts words as SQuAD does and gives 0.4.
# Hurts: comparisons of models and stopping rules: one that loops until the last token scores as well as one that stops;
#   and scores beside those of SQuAD's own script or inspect-ai.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  # the whole of HELM needs many more packages; its metrics need these
  "$PYTHON" -m pip install --quiet --no-compile lighteval==0.13.0  # with inspect-ai, which it requires
  "$PYTHON" -m pip install --quiet --no-compile pyhocon==0.3.63 zstandard==0.25.0 colorlog==6.12.0 sqlitedict==2.1.0 \
    retrying==1.4.2 mako==1.4.3 dacite==1.9.2 cattrs==26.2.1
  "$PYTHON" -m pip install --quiet --no-compile --no-deps crfm-helm==0.5.16
fi
HF_HUB_OFFLINE=1 "$PYTHON" - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import asyncio

from helm.benchmark.metrics.evaluate_reference_metrics import f1_score
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, f1
from inspect_ai.solver import TaskState
from lighteval.metrics.metrics import Metrics
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc


def by_lighteval(right, answer):
    metric = Metrics.f1_score.value.sample_level_fn
    return metric.compute(doc=Doc(query="", choices=[right], gold_index=0), model_response=ModelResponse(text=[answer]))


def by_inspect(right, answer):
    output = ModelOutput.from_content("model", answer)
    state = TaskState(model="mockllm/model", sample_id=1, epoch=1, input="question", messages=[], output=output)
    return asyncio.run(f1()(state, Target(right))).value


cases = {  # right answer, answer: F1 with counts
    ("Paris", "Paris"): 1.0,
    ("Paris", "Paris Paris Paris Paris"): 0.4,
    ("1 1 2", "1 2"): 0.8,
    ("0 1 1 0", "0 1"): 0.67,
    ("Paris", "Paris London"): 0.67,
}
for (right, answer), counted in cases.items():
    scores = f1_score(right, answer), by_lighteval(right, answer), by_inspect(right, answer)
    names = "HELM {:.2f}, lighteval {:.2f}, inspect-ai {:.2f}".format(*scores)
    print(f"right {right!r}, answer {answer!r}: {names}")
    as_sets = 0.67 if "London" in answer else 1
    assert abs(scores[2] - counted) < 0.01
    assert all(abs(score - as_sets) < 0.01 for score in scores[:2]), "the behaviour has changed"
PY
