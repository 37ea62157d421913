#!/bin/sh
# Question: rows have different numbers of target tokens (the others are -100). Is the eval_loss of transformers'
#   Trainer the mean over all target tokens, whatever the batch size?
# Guess: yes, as in training, where a step's loss is divided by the targets of all its micro-batches.
# Seen (transformers 5.23.0): no. It is the mean over rows of the mean loss of the row's batch. Below, one row in four
#   has 31 targets that the model predicts badly, and the others have 3 that it predicts well. The same model and rows
#   give 1.8 with batches of one row, and 5.5, the mean over tokens, with batches of four.
# Hurts: perplexities and the choice of a checkpoint, where runs are evaluated with different batch sizes. Short rows
#   count too much, and more so in small batches.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
easy = torch.full((1, 32), 5)
for _ in range(60):
    model(easy, labels=easy).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def row(index):
    ids = torch.randint(0, 32, (32,)).tolist() if index % 4 == 0 else [5] * 32
    targets = 32 if index % 4 == 0 else 4
    return {"input_ids": ids, "labels": ids[:targets] + [-100] * (32 - targets)}


rows = [row(i) for i in range(16)]
with torch.no_grad():
    logits = model(torch.tensor([row["input_ids"] for row in rows])).logits[:, :-1]
labels = torch.tensor([row["labels"] for row in rows])[:, 1:]
of_rows = torch.stack([F.cross_entropy(*pair) for pair in zip(logits, labels, strict=True)])
of_tokens = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
print(f"mean over tokens {of_tokens:.3f}, mean over rows {of_rows.mean():.3f}")
seen = {}
for batch_size in (1, 2, 4):
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(f"{sys.argv[1]}/run", per_device_eval_batch_size=batch_size, **options)
    seen[batch_size] = Trainer(model, arguments, eval_dataset=rows).evaluate()["eval_loss"]
    print(f"batches of {batch_size}: eval_loss {seen[batch_size]:.3f}")
assert abs(seen[4] - of_tokens) < 1e-3
assert abs(seen[1] - of_rows.mean()) < 1e-3 and seen[1] < 0.5 * of_tokens, "the behaviour has changed"
PY
