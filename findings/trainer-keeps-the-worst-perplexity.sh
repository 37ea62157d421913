#!/bin/sh
# Question: transformers' Trainer keeps the best checkpoint: load_best_model_at_end=True, save_total_limit=1,
#   metric_for_best_model="perplexity", which compute_metrics returns. Which checkpoint is left?
# Guess: the one with the lowest perplexity.
# Seen (transformers 5.23.0): the one with the highest, the first. Unless greater_is_better is given, a metric counts as
#   better when greater if its name does not end with "loss", as documented. That includes perplexity, bits_per_byte,
#   wer and error_rate. The run deletes the better checkpoints, loads the worst one at its end, and says nothing;
#   early stopping stops when perplexity falls.
# Hurts: the final model. Logged perplexities fall as they should, and only the evaluation after training shows 18 where
#   the last step had 8.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
fi
"$PYTHON" - "$dir" <<'PY'
import pathlib
import sys

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
rows = [{"input_ids": [i % 32] * 16, "labels": [i % 32] * 16} for i in range(64)]


def metrics(evaluation):
    logits, labels = torch.tensor(evaluation.predictions)[:, :-1], torch.tensor(evaluation.label_ids)[:, 1:]
    return {"perplexity": F.cross_entropy(logits.flatten(0, 1), labels.flatten()).exp().item()}


folder = pathlib.Path(sys.argv[1], "run")
options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "eval_strategy": "steps", "save_strategy": "steps"}
options |= {"max_steps": 40, "eval_steps": 10, "save_steps": 10, "learning_rate": 1e-2}
options |= {"load_best_model_at_end": True, "save_total_limit": 1, "metric_for_best_model": "perplexity"}
data = {"train_dataset": rows, "eval_dataset": rows[:32]}
trainer = Trainer(model, TrainingArguments(folder, **options), compute_metrics=metrics, **data)
trainer.train()
history = {log["step"]: log["eval_perplexity"] for log in trainer.state.log_history if "eval_perplexity" in log}
left = [path.name for path in folder.iterdir()]
final = trainer.evaluate()["eval_perplexity"]
print(f"perplexities by step {history}; checkpoints left: {left}; perplexity of the model that is loaded: {final:.2f}")
assert min(history, key=history.get) == 40 and max(history, key=history.get) == 10
assert left == ["checkpoint-10"] and abs(final - history[10]) < 1e-2, "the behaviour has changed"
PY
