#!/bin/sh
# Question: a subclass of transformers' Trainer has its own compute_loss, which returns a mean, such as the cross-entropy of
#   its batch. Rows come as one batch of 8, or as 4 micro-batches of 2 by gradient_accumulation_steps. Is the gradient the
#   same?
# Guess: yes. The Trainer divides the loss of a micro-batch by their number.
# Seen (transformers 5.23.0): it is 4 times as large, and so are the logged loss and grad_norm. The Trainer divides only if
#   the forward() of the model takes no **kwargs. All language models of transformers take them, since their own loss is
#   divided by the tokens of the whole step; whether compute_loss uses that loss is not looked at. For an own model with
#   forward(input_ids, labels) the same subclass is right. `trainer.model_accepts_loss_kwargs = False` helps, and so does
#   a loss that is divided by num_items_in_batch. This has been reported to transformers' authors.
# Hurts: losses with weights, distillation, contrastive and auxiliary terms: max_grad_norm clips 4 times as hard, SGD takes
#   steps 4 times as long, and settings that were tuned without accumulation are wrong with it. eval_loss is right.
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
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0)).tolist()
rows = [{"input_ids": row, "labels": row} for row in ids]


class OwnModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, input_ids, labels=None):
        return {"logits": self.head(self.embedding(input_ids))}


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def llama():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def first_step(make_model, trainer_class, accumulation, accepts=None):
    torch.manual_seed(0)
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    options |= {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    trainer = trainer_class(make_model(), TrainingArguments(sys.argv[1], max_steps=1, **options), train_dataset=rows)
    if accepts is not None:
        trainer.model_accepts_loss_kwargs = accepts
    trainer.train()
    log = trainer.state.log_history[0]
    return log["loss"], log["grad_norm"]


cases = {
    "Llama, own compute_loss": (llama, OwnLoss),
    "Llama, own compute_loss, model_accepts_loss_kwargs = False": (llama, OwnLoss, False),
    "Llama, the Trainer's compute_loss": (llama, Trainer),
    "own model, own compute_loss": (OwnModel, OwnLoss),
}
ratios = {}
for name, (model, trainer, *accepts) in cases.items():
    once, split = (first_step(model, trainer, accumulation, *accepts) for accumulation in (1, 4))
    ratios[name] = split[0] / once[0], split[1] / once[1]
    print(f"{name}: with 4 micro-batches, the loss is {ratios[name][0]:.2f} times, "
          f"the gradient {ratios[name][1]:.2f} times")
first, *others = cases
assert all(abs(ratio - 1) < 1e-3 for name in others for ratio in ratios[name])
assert all(abs(ratio - 4) < 1e-3 for ratio in ratios[first]), "the behaviour has changed"
PY
