#!/bin/sh
# Question: Lightning trains a model for one epoch, with its callback StochasticWeightAveraging(swa_lrs=…) and the other
#   settings left alone. Which weights has the model after trainer.fit?
# Guess: the average of weights after training; for one epoch that of its end. Averages leave the last epoch in.
# Seen (lightning 2.6.6, torch 2.13.0): those that it began with, bit for bit. The weights are averaged at the start of an
#   epoch, from swa_epoch_start - 1 on, so the last epoch never counts; it is trained for nothing. With one epoch, the
#   default of 0.8 begins at epoch 0, and the average is that of the first weights alone. With two epochs it is half the
#   first weights, with ten that of the weights after 7, 8 and 9 epochs. There is no message. Checkpoints hold the trained
#   weights. Models with BatchNorm have the same average, also in the last checkpoint. torch's recipe averages at the end
#   of an epoch.
# Hurts: runs of one or a few epochs, as in pretraining: a model that is evaluated or saved after fit is untrained, or half
#   so, while the validation loss of the run, of weights before the average, looks right. Use EMAWeightAveraging, which
#   counts steps, or load the last checkpoint.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 lightning==2.6.6 numpy==2.4.6
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import logging
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Counter(lightning.LightningModule):
    """One weight, which grows by 1 in each epoch of 4 steps."""

    def __init__(self, batch_norm):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.norm = torch.nn.BatchNorm1d(1, affine=False) if batch_norm else torch.nn.Identity()

    def training_step(self, batch, index):
        return self.norm(batch).sum() * 0 - self.weight

    def validation_step(self, batch, index):
        self.validated = self.weight.item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)


def after(epochs, batch_norm=False):
    """The weight after fit, and those that the last validation and the last checkpoint saw."""
    model = Counter(batch_norm)
    folder = f"{sys.argv[1]}/{epochs} {batch_norm}"
    callbacks = [StochasticWeightAveraging(swa_lrs=0.25), ModelCheckpoint(folder, save_last=True)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=callbacks, **quiet)
    loaders = [torch.utils.data.DataLoader(torch.randn(8, 1), batch_size=2) for _ in range(2)]
    trainer.fit(model, *loaders)
    saved = torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]["weight"].item()
    result = model.weight.item()
    print(f"{epochs} epochs: {result:.2f} after fit, {model.validated:.2f} in validation, {saved:.2f} in the checkpoint")
    return result, model.validated, saved


print("lightning", lightning.__version__, "torch", torch.__version__)
assert after(1) == (0, 1, 1), "the behaviour has changed"
assert after(2)[0] == 0.5 and after(3)[0] == 1.5 and after(10)[0] == 8, "the behaviour has changed"
assert after(10, batch_norm=True)[0] == 8, "the behaviour has changed"
PY
