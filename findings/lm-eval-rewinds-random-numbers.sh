#!/bin/sh
# Question: a training loop draws its batches with torch.randint, as nanoGPT does, and calls lm_eval.simple_evaluate
#   every 100 steps. Which parts of the data does it see?
# Guess: as many as without the evaluations. An evaluation draws its own random numbers, or a few of the loop's.
# Seen (lm_eval 0.4.13): after every evaluation the same 100 batches, in the same order. simple_evaluate by default sets
#   the seeds of torch, numpy and random to 1234, 1234 and 0, and what follows draws from there. Dropout repeats too.
#   Below, 1,000 steps see 200 different batches instead of 1,000. The message about the seeds has the level INFO. With
#   torch_random_seed=None, numpy_random_seed=None and random_seed=None, nothing repeats.
# Hurts: training loops that score benchmarks on the way. The run trains on a small part of its data again and again,
#   smaller the more often it is evaluated; the loss falls even faster, and no message says why.
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
import torch
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

logging.disable(logging.WARNING)
folder = Path(sys.argv[1])
rows = [{"question": f"item {i} is", "answer": i % 3} for i in range(30)]
(folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
task = {
    "task": "colours",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder)},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": ["red", "green", "blue"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
manager = TaskManager(include_defaults=False)


class Constant(LM):
    """A model that draws no random numbers."""

    def loglikelihood(self, requests):
        return [(-float(len(request.args[1])), False) for request in requests]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    generate_until = loglikelihood_rolling


def batches_seen(evaluate_every, **seeds):
    """Numbers of batches that 1,000 steps see; a batch is 4 positions in a corpus of a billion tokens."""
    torch.manual_seed(0)
    seen = set()
    for step in range(1, 1001):
        seen.add(tuple(torch.randint(1_000_000_000, (4,)).tolist()))
        if evaluate_every and step % evaluate_every == 0:
            lm_eval.simple_evaluate(Constant(), tasks=[dict(task)], task_manager=manager, bootstrap_iters=0, **seeds)
    return len(seen)


none = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
seen = {
    "no evaluation": batches_seen(None),
    "evaluated every 100 steps": batches_seen(100),
    "evaluated every 100 steps, seeds None": batches_seen(100, **none),
}
for name, count in seen.items():
    print(f"{name}: 1,000 steps see {count} different batches")
assert seen["no evaluation"] == seen["evaluated every 100 steps, seeds None"] == 1000
assert seen["evaluated every 100 steps"] <= 200, "the behaviour has changed"
PY
