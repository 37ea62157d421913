#!/bin/sh
# Question: transformers' Trainer trains a mixture of experts (output_router_logits=True), with batches of 8 rows in one
#   piece, or in 4 micro-batches by gradient_accumulation_steps. Does the router's loss have the same weight?
# Guess: yes. The Trainer takes care that accumulation changes nothing.
# Seen (transformers 5.23.0, Mixtral): no. The weight is 4 times as large. The cross-entropy of a micro-batch is divided
#   by the tokens of the whole step, so the Trainer no longer divides by the number of micro-batches; but the model adds
#   the router's loss, a mean, to each of them. The logged loss contains it as often. Without the router's loss, both
#   agree.
# Hurts: whoever changes the micro-batch to fit memory, or compares runs: router_aux_loss_coef means something else, and
#   experts are balanced at the cost of the language model's loss. Divide it by the accumulation steps.
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
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

logging.set_verbosity_error()
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 32))]
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}


class RouterGradient(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.norm = model.model.layers[0].mlp.gate.weight.grad.norm().item()


def step(micro_batches, coefficient):
    """The logged loss and the router's gradient of one step over the same 8 rows."""
    torch.manual_seed(0)
    config = MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=coefficient)
    arguments = TrainingArguments(
        sys.argv[1], per_device_train_batch_size=8 // micro_batches, gradient_accumulation_steps=micro_batches,
        max_steps=1, logging_steps=1, learning_rate=0.0, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )
    gradient = RouterGradient()
    trainer = Trainer(MixtralForCausalLM(config), arguments, train_dataset=rows, callbacks=[gradient])
    trainer.train()
    return next(log["loss"] for log in trainer.state.log_history if "loss" in log), gradient.norm


seen = {}
for micro_batches in (1, 4):
    (plain, _), (loss, norm) = step(micro_batches, 0.0), step(micro_batches, 1.0)
    seen[micro_batches] = plain, loss - plain
    print(f"{micro_batches} micro-batches: loss {plain:.3f}, with router_aux_loss_coef=1 {loss:.3f}, "
          f"the router's part {loss - plain:.3f}, its gradient {norm:.3f}", flush=True)
assert max(plain for plain, _ in seen.values()) - min(plain for plain, _ in seen.values()) < 1e-3
ratio = seen[4][1] / seen[1][1]
assert 3.5 < ratio < 4.5, "the behaviour has changed"
PY
