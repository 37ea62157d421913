#!/bin/sh
# Question: Lightning trains for 10 epochs of 4 steps with EMAWeightAveraging(decay=0.9, update_starting_at_epoch=8), to
#   leave the first epochs out of the average. Where does the average begin?
# Guess: with the weights of epoch 8, as update_starting_at_step=32 begins with those after 32 steps.
# Seen (lightning 2.6.6, torch 2.13.0): after the first step. Without update_starting_at_step, every step is averaged from
#   the first on, whatever the epoch. From that epoch on, the last step of an epoch counts twice, and that is the only
#   effect. Epochs 0, 8 and 100 all average the early steps. There is no message. With update_every_n_steps=0 beside it,
#   the average begins at the end of epoch 8, and has one update per epoch.
# Hurts: averages that shall begin after the warm-up: with a decay of 0.9999 in a run of some thousand steps, most of the
#   average are weights of the time that was to be left out. Use update_starting_at_step.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 lightning==2.6.6 numpy==2.4.6
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import logging

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
STEPS, EPOCHS, DECAY = 4, 10, 0.9


class Counter(lightning.LightningModule):
    """One weight, which grows by 1 at each step, so that its value is the number of steps."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, index):
        return -self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def result(**settings):
    """The weight after training, which is the average."""
    model = Counter()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[EMAWeightAveraging(decay=DECAY, **settings)],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(STEPS, 1)))
    return model.weight.item()


def average(steps):
    """The moving average of the weights after these steps, which begins with the first of them."""
    mean = steps[0]
    for step in steps[1:]:
        mean = DECAY * mean + (1 - DECAY) * step
    return mean


every = list(range(1, STEPS * EPOCHS + 1))
twice = {epoch: sorted(every + every[STEPS * (epoch + 1) - 1 :: STEPS]) for epoch in (0, 8)}
cases = {
    "no start": ({}, every),
    "step 32": ({"update_starting_at_step": 32}, every[32:]),
    "epoch 8": ({"update_starting_at_epoch": 8}, twice[8]),
    "epoch 0": ({"update_starting_at_epoch": 0}, twice[0]),
    "epoch 100": ({"update_starting_at_epoch": 100}, every),
    "epoch 8, no steps": ({"update_starting_at_epoch": 8, "update_every_n_steps": 0}, [36, 40]),
}
for name, (settings, steps) in cases.items():
    seen = result(**settings)
    print(f"{name}: {seen:.2f}, the average of the steps {steps[0]}, {steps[1]} … {steps[-1]}")
    assert abs(seen - average(steps)) < 1e-3, "the behaviour has changed"
PY
