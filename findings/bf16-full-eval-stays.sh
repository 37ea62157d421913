#!/bin/sh
# Question: a script calls trainer.train(), trainer.evaluate() and trainer.save_model(), with bf16_full_eval=True of
#   transformers' Trainer, which saves memory. The weights are fp32. In which dtype are they saved?
# Guess: fp32. The documentation says that the option "only applies during evaluation".
# Seen (transformers 5.23.0): bf16. Outside of train(), evaluate() and predict() convert the model itself and leave it
#   so, RoPE's frequencies included. With evaluate() before train(), to log the loss at the start, the whole training
#   runs on bf16 weights: at a learning rate of 1e-5, AdamW then changes 15% of the weights in 5 steps, instead of all.
#   Evaluations that train() itself starts (eval_strategy) convert nothing.
# Hurts: fine-tuning and continued pretraining: the saved weights have lost 16 bits, and after a first evaluate() small
#   updates are lost all the time. No message says so.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
fi
"$PYTHON" - "$dir" <<'PY'
import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

logging.disable_progress_bar()
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
generator = torch.Generator().manual_seed(0)
ids = torch.randint(64, (64, 32), generator=generator).tolist()
rows = [{"input_ids": row, "labels": row} for row in ids]


def run(*calls):
    """The saved dtype, and the share of weights that 5 steps of training change."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 5}
    options |= {"bf16_full_eval": True, "learning_rate": 1e-5, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    arguments = TrainingArguments(f"{sys.argv[1]}/run", logging_strategy="no", **options)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    before = [weight.detach().clone() for weight in model.parameters()]
    for call in calls:
        getattr(trainer, call)()
        if call == "train":
            pairs = list(zip(before, model.parameters(), strict=True))
            changed = sum((old.to(new.dtype) != new).sum().item() for old, new in pairs)
            share = changed / sum(old.numel() for old in before)
    trainer.save_model(f"{sys.argv[1]}/saved")
    with open(f"{sys.argv[1]}/saved/config.json") as file:
        return json.load(file)["dtype"], share


seen = {}
for calls in (("train",), ("train", "evaluate"), ("evaluate", "train")):
    seen[calls] = dtype, share = run(*calls)
    print(f"{', '.join(calls)}, save_model: saved as {dtype}, training changed {share:.0%} of the weights", flush=True)
assert seen[("train",)][0] == "float32" and seen[("train",)][1] > 0.9
assert seen["train", "evaluate"][0] == "bfloat16" and seen["evaluate", "train"][0] == "bfloat16"
assert seen["evaluate", "train"][1] < 0.5, "the behaviour has changed"
PY
