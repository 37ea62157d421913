#!/bin/sh
# Question: a task of lm-eval has only a test split, and few-shot examples are drawn from it. Can a question be among
#   its own examples, with its answer?
# Guess: no. lm-eval removes the question that is asked from the examples.
# Seen (lm_eval 0.4.13): yes. The question is removed only if the task says `fewshot_split: test` as well; without it,
#   and with `validation_split: validation, fewshot_split: validation`, it is not. With n examples, n questions on
#   average show their answer, and with the sampler first_n the first n do. For a task with only a test split, lm-eval
#   warns that examples from it are not recommended, but not of this; in the other case there is no warning.
# Hurts: few-shot scores of small tasks: own ones, and with --num_fewshot 3,337 of the 13,077 tasks that come with
#   lm-eval (wsc273, lambada_openai, …). A model that copies answers these questions. Name the split twice.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 'lm_eval[hf]==0.4.13'
fi
"$PYTHON" - "$dir" <<'PY'
import json
import logging
import sys
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

logging.disable(logging.WARNING)
folder = Path(sys.argv[1])
rows = [{"question": f"item {i} is", "answer": i % 3} for i in range(30)]
(folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
task = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"rows": str(folder / "rows.jsonl")}, "cache_dir": str(folder)},
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": ["red", "green", "blue"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
    "num_fewshot": 5,
}


class Records(LM):
    """Keeps the prompts; the scores do not matter."""

    def loglikelihood(self, requests):
        self.prompts = {request.args[0] for request in requests}
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    generate_until = loglikelihood_rolling


def shows_its_answer(prompt):
    *examples, question = prompt.split("\n\n")
    return any(example.startswith(question + " ") for example in examples)


cases = {
    "test_split": {"test_split": "rows"},
    "test_split, fewshot_split": {"test_split": "rows", "fewshot_split": "rows"},
    "validation_split, fewshot_split": {"validation_split": "rows", "fewshot_split": "rows"},
    "test_split, first_n": {"test_split": "rows", "fewshot_config": {"sampler": "first_n"}},
}
manager, seen = TaskManager(include_defaults=False), []
for number, (name, keys) in enumerate(cases.items()):
    model, config = Records(), {**task, **keys, "task": f"task{number}"}
    lm_eval.simple_evaluate(model, tasks=[config], task_manager=manager, bootstrap_iters=0)
    shown = list(filter(shows_its_answer, model.prompts))
    seen.append(len(shown))
    print(f"{name}: {len(shown)} of {len(model.prompts)} prompts show their own question with its answer", flush=True)
print(shown[0])
assert seen[1] == 0
assert min(seen[0], seen[2]) > 0 and seen[3] == 5, "the behaviour has changed"
PY
