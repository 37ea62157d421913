#!/bin/sh
# Question: transformers' Trainer trains with train_sampling_strategy="group_by_length". Afterwards, trainer.predict(test)
#   returns predictions. Does the first belong to the first row of test?
# Guess: yes. The option is about training, as its name says.
# Seen (transformers 5.23.0): no. Evaluation and prediction group the rows by length too, to pad less, and predictions and
#   label_ids are returned in that order, without the order itself. Metrics are right, since both have the same order, and
#   nothing says that it is not the dataset's. Without the option, predictions are in the dataset's order.
# Hurts: whoever writes predictions beside the rows they were made for: scores and labels of documents for filtering a
#   corpus, log-probabilities of a reference model, answers that are looked at or handed in. Every row gets another row's.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
fi
"$PYTHON" - "$dir" <<'PY'
import random
import sys

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

random.seed(0)
rows = [{"input_ids": [row] * random.randint(2, 30), "labels": row} for row in range(20)]


class FirstToken(nn.Module):
    """Predicts the first token of a row, which is the row's number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, labels=None):
        return {"loss": self.weight.sum(), "logits": input_ids[:, :1].float()}


def pad(batch):
    longest = max(len(row["input_ids"]) for row in batch)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor([row["labels"] for row in batch])}


seen = {}
for strategy in ("random", "group_by_length"):
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "per_device_eval_batch_size": 4}
    arguments = TrainingArguments(sys.argv[1], train_sampling_strategy=strategy, **options)
    output = Trainer(FirstToken(), arguments, data_collator=pad).predict(rows)
    seen[strategy] = [int(number) for number in output.predictions[:, 0]]
    assert seen[strategy] == output.label_ids.tolist()
    print(f"{strategy}: predictions of rows {', '.join(map(str, seen[strategy]))}")
assert seen["random"] == list(range(20))
assert sorted(seen["group_by_length"]) == list(range(20)) != seen["group_by_length"], "the behaviour has changed"
PY
