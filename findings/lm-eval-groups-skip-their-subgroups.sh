#!/bin/sh
# Question: an lm-eval group has two members: a task, on which a model scores 1.0, and a subgroup of nine tasks, whose score
#   is 0.0. Both groups set weight_by_size: false, so that each member weighs the same. What is the score of the group?
# Guess: 0.5, the mean of its two members, whose scores stand below it in the table.
# Seen (lm_eval 0.4.13): 0.1. A group averages its leaves, all ten tasks, however they are nested; the scores of subgroups
#   do not enter. With weight_by_size: true it is 0.1, too, if the tasks are of one size. One task of 20 questions in the
#   subgroup in place of nine gives 0.5. There is no message, and the documentation speaks of the group's subtasks.
# Hurts: suites in categories: a category counts by the number of its tasks, and dividing one into more tasks changes the
#   total, which cannot be computed from the scores that stand below it. Average the subgroups' scores yourself.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 'lm_eval[hf]==0.4.13' numpy==2.4.6
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path

import lm_eval
import yaml
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

logging.disable(logging.WARNING)
print("lm_eval", version("lm_eval"))


class Yes(LM):
    """A model that answers yes to each question."""

    def loglikelihood(self, requests, **_):
        return [(0.0 if request.args[1].strip() == "yes" else -1.0, False) for request in requests]

    def loglikelihood_rolling(self, requests, **_):
        return []

    def generate_until(self, requests, **_):
        return []


def task(folder, name, right, questions=20):
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(json.dumps({"q": f"q{i}", "a": 1 - right}) for i in range(questions)))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_target": "a",
        "doc_to_choice": ["yes", "no"],
        "metric_list": [{"metric": "acc"}],
    }


def score(folder, tasks_of_subgroup, by_size):
    """The scores of the task, of the subgroup and of the group of both."""
    folder.mkdir()
    names = [f"wrong_{i}" for i in range(tasks_of_subgroup)]
    mean = [{"metric": "acc", "weight_by_size": by_size}]
    files = [task(folder, "right", 1), *(task(folder, name, 0) for name in names)]
    files.append({"group": "subgroup", "task": names, "aggregate_metric_list": mean})
    files.append({"group": "whole", "task": ["right", "subgroup"], "aggregate_metric_list": mean})
    for i, file in enumerate(files):
        (folder / f"{i}.yaml").write_text(yaml.dump(file))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(Yes(), tasks=["whole"], task_manager=manager, bootstrap_iters=0)
    scores = results["results"] | results["groups"]
    seen = tuple(round(scores[name]["acc,none"], 4) for name in ("right", "subgroup", "whole"))
    print(f"a task {seen[0]}, a subgroup of {tasks_of_subgroup} tasks {seen[1]}, weight_by_size {by_size}: group {seen[2]}")
    return seen


folder = Path(sys.argv[1])
assert score(folder / "one", 1, False) == (1, 0, 0.5)
assert score(folder / "nine", 9, False) == (1, 0, 0.1), "the behaviour has changed"
assert score(folder / "by-size", 9, True) == (1, 0, 0.1), "the behaviour has changed"
PY
