#!/bin/sh
# Question: lm-eval scores a task with 5 examples (few-shot) on one GPU, and the same model and task on two
#   (`accelerate launch`). Does a question have the same examples?
# Guess: yes. fewshot_random_seed is the same, and a question's examples are part of the task.
# Seen (lm_eval 0.4.13): no, except for the very first question. Examples are drawn for one question after another from
#   one generator, and every process draws only for its own questions, each from the same seed. Two questions beside
#   each other even share their examples then. evaluate(), called again for the next checkpoint with the same task
#   objects, goes on with the generator and shows other examples as well. Without examples, nothing changes.
# Hurts: few-shot scores of the same weights differ between machines with different numbers of GPUs, and between the
#   first and the later checkpoints of a loop, by as much as with another seed. Call task.set_fewshot_seed before each
#   evaluation, and compare runs with the same number of processes, or let the sampler be first_n.
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

from lm_eval.tasks import TaskManager

logging.disable(logging.WARNING)
folder = Path(sys.argv[1])
files = {}
for split in ("train", "test"):
    files[split] = str(folder / f"{split}.jsonl")
    rows = [{"question": f"{split} item {i} is", "answer": i % 3} for i in range(200)]
    Path(files[split]).write_text("\n".join(map(json.dumps, rows)))
config = {
    "task": "colours",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": files, "cache_dir": str(folder)},
    "training_split": "train",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": ["red", "green", "blue"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
    "num_fewshot": 5,
}
[task] = TaskManager(include_defaults=False).load([config])["tasks"].values()


def prompts(processes, restart=True):
    """The prompt of every question: each process of `lm_eval.evaluate` builds those of its share, as here."""
    of_questions = {}
    for rank in range(processes):
        if restart:
            task.set_fewshot_seed(1234)  # every process does so, by simple_evaluate's default
        task.build_all_requests(rank=rank, world_size=processes)
        of_questions |= {request.doc_id: request.args[0] for request in task.instances}
    return of_questions


def different(others):
    return sum(first[question] != others[question] for question in first)


first, seen = prompts(1), {}
assert len(first) == 200
for processes in (1, 2, 8):
    seen[processes] = different(prompts(processes))
    print(f"{processes} process(es): {seen[processes]} of 200 questions have other examples than with one", flush=True)
prompts(1)
again = different(prompts(1, restart=False))
print(f"evaluated again with the same task object: {again} of 200 questions have other examples")
with_two = prompts(2)
examples = [with_two[question].rsplit("\n\n", 1)[0] for question in range(200)]
shared = sum(examples[i] == examples[i + 1] for i in range(0, 200, 2))
print(f"two processes: in {shared} of 100 pairs, both questions have the same examples")
assert seen[1] == 0
assert min(seen[2], seen[8], again) > 150 and shared == 100, "the behaviour has changed"
PY
