#!/bin/sh
# Question: Composer trains with the algorithm EMA(half_life="1ep"), an average that is updated once per epoch, and saves
#   checkpoints by batches, save_interval="4ba", where an epoch has 4 or 8 batches. Do the checkpoints change the run?
# Guess: no. The average is a copy beside the model, and a checkpoint only reads.
# Seen (mosaicml 0.32.1, torch 2.7.0): yes. For a checkpoint, EMA swaps the model's weights with the average, and swaps
#   them back at the start of the next batch. A checkpoint after the last batch of an epoch comes before the epoch's end, so
#   that the update finds them swapped: the weights in training become the mean of the two, and the average is left as it
#   was. A weight that grows by 1 per batch falls from 8 to 6 after the second epoch and ends at 7 instead of 12. The
#   average is 4, that of the first epoch, instead of 9. With "3ba", only the checkpoint at the run's end meets the end of
#   an epoch, and the average lacks the last epoch. With save_interval="1ep", an average per batch (half_life="2ba") or no
#   checkpoints, all is right. There is no message.
# Hurts: long runs that are thrown back once per epoch, as by a rate that is too small, and whose averaged weights, which
#   are evaluated and saved, are those of the first epoch.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.7.0 mosaicml==0.32.1 numpy==2.2.6 setuptools
fi
"$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import sys
import tempfile

import torch
from composer import Callback, Trainer
from composer.algorithms import EMA
from composer.models import ComposerModel

BATCHES, EPOCHS = 4, 3


class Counter(ComposerModel):
    """One weight, which grows by 1 in each batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return self.weight

    def loss(self, outputs, batch):
        return -outputs


class Weights(Callback):
    """The weight at the start of each batch."""

    def __init__(self):
        self.seen = []

    def batch_start(self, state, logger):
        self.seen.append(round(state.model.weight.item(), 2))


def run(half_life, save):
    """The weight at the start of each batch, and the weight in training and the average after the last."""
    model, weights, ema = Counter(), Weights(), EMA(half_life=half_life)
    saving = {"save_folder": tempfile.mkdtemp(dir=sys.argv[1]), "save_interval": save} if save else {}
    trainer = Trainer(
        model=model, train_dataloader=torch.utils.data.DataLoader(torch.zeros(BATCHES, 1)), max_duration=f"{EPOCHS}ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0), algorithms=[ema], callbacks=[weights], device="cpu",
        progress_bar=False, **saving,
    )  # fmt: skip
    trainer.fit()
    last, stored = model.weight.item(), ema.ema_model.named_parameters_dict["weight"].item()
    trained, average = (stored, last) if ema.ema_weights_active else (last, stored)
    trainer.close()
    starts = " ".join(format(value, "g") for value in weights.seen)
    print(f"EMA({half_life}), saved every {save}: {starts}, at the end {trained:.4g}, average {average:.4g}")
    return weights.seen, trained, round(average, 2)


plain = list(range(BATCHES * EPOCHS))
for half_life, save in (("1ep", None), ("1ep", "1ep"), ("2ba", None), ("2ba", "4ba")):
    assert run(half_life, save) == (plain, 12, 9 if half_life == "1ep" else 9.64)
assert run("1ep", "3ba") == (plain, 9, 6), "the behaviour has changed"
for save in ("4ba", "2ba"):
    assert run("1ep", save) == ([0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9], 7, 4), "the behaviour has changed"
PY
