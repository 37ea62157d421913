#!/bin/sh
# Question: transformers' Trainer trains with optim="schedule_free_adamw". That optimizer evaluates at an average of its
#   weights, and trains at another point. Which of the two is in the checkpoints, and in the model after train()?
# Guess: the average. The Trainer calls the optimizer's train() and eval() itself.
# Seen (transformers 5.23.0, schedulefree 1.4.1): a checkpoint has the average only if an evaluation came just before the
#   save. With eval_strategy="no", or save_steps that are not a multiple of eval_steps, it has the training point. Below,
#   its loss is 0.026 nats above that of the average. After train(), the model is the average if there are evaluations, and
#   else the training point. There is no message. trainer.optimizer.optimizer.eval() helps the model in memory; a
#   checkpoint of the weights alone cannot be repaired.
# Hurts: runs whose checkpoints are evaluated or served later, as in pretraining without an eval set: they lose what the
#   averaging was chosen for, and seem to show that the optimizer is worse than a schedule.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 schedulefree==1.4.1
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

logging.disable_progress_bar()
generator = torch.Generator().manual_seed(0)
chain = torch.rand(64, 64, generator=generator).pow(30)  # text of a random Markov chain
rows = torch.randint(64, (512, 1), generator=generator)
for _ in range(31):
    rows = torch.cat([rows, torch.multinomial(chain[rows[:, -1]], 1, generator=generator)], 1)
data = [{"input_ids": row, "labels": row} for row in rows.tolist()]
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def loss(model):
    with torch.no_grad():
        return model.eval()(input_ids=rows[:128], labels=rows[:128]).loss.item()


def run(name, **evaluation):
    """The losses of checkpoint 400, of the model that train() leaves after step 500, and of the average then."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", "max_steps": 500}
    options |= {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "learning_rate": 0.03}
    arguments = TrainingArguments(f"{sys.argv[1]}/{name}", save_steps=400, **options, **evaluation)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:64])
    trainer.train()
    saved = loss(LlamaForCausalLM.from_pretrained(f"{sys.argv[1]}/{name}/checkpoint-400"))
    left = loss(model)
    trainer.optimizer.optimizer.eval()
    return saved, left, loss(model)


seen = {}
for name, evaluation in {
    "no evaluation": {},
    "evaluation every 150 steps": {"eval_strategy": "steps", "eval_steps": 150},
    "evaluation every 200 steps": {"eval_strategy": "steps", "eval_steps": 200},
}.items():
    seen[name] = saved, left, average = run(name, **evaluation)
    print(f"{name}: checkpoint 400 has a loss of {saved:.3f}; the model after training {left:.3f}, "
          f"the average {average:.3f}")
averages = [average for _, _, average in seen.values()]
assert max(averages) - min(averages) < 1e-3
average = seen["evaluation every 200 steps"][0]
for name in ("no evaluation", "evaluation every 150 steps"):
    assert seen[name][0] > average + 0.01, "the behaviour has changed"
assert seen["no evaluation"][1] > averages[0] + 0.01, "the behaviour has changed"
PY
