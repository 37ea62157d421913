#!/bin/sh
# Question: Composer trains with the algorithm EMA(half_life="2ba"), whose average is what its evaluations use. After
#   trainer.fit, which weights has the model: those of training, or the average?
# Guess: always the same of the two, whether or not the run wrote checkpoints: saving does not change a model.
# Seen (mosaicml 0.32.1, torch 2.7.0): the average if the last thing that the run did was to save a checkpoint, and the
#   weights of training if it was an evaluation, or if nothing was saved. With save_folder, a checkpoint is written at the
#   end of training whatever its interval. So a run that saves has the average, but not one that saves by batches, has its
#   last batch in this rhythm and evaluates per epoch. trainer.eval after fit scores the average in all of them, and leaves
#   the weights of training. There is no message.
# Hurts: whoever saves, exports or tests the model in memory after training: adding save_folder or an evaluation changes
#   which model that is, and it may be another one than the evaluation of the run reports.
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
from composer import Trainer
from composer.algorithms import EMA
from composer.models import ComposerModel

BATCHES, EPOCHS = 4, 3


class Counter(ComposerModel):
    """One weight, which grows by 1 in each batch."""

    def __init__(self):
        super().__init__()
        self.weight, self.evaluated = torch.nn.Parameter(torch.zeros(())), []

    def forward(self, batch):
        return self.weight

    def loss(self, outputs, batch):
        return -outputs

    def eval_forward(self, batch, outputs=None):
        self.evaluated.append(round(self.weight.item(), 2))
        return self.weight

    def get_metrics(self, is_train):
        return {}


def run(save=None, evaluate=None):
    """The weight after training, and the weight in and after an evaluation."""
    model, ema = Counter(), EMA(half_life="2ba")
    rows = torch.utils.data.DataLoader(torch.zeros(BATCHES, 1))
    saving = {"save_folder": tempfile.mkdtemp(dir=sys.argv[1]), "save_interval": save} if save else {}
    evaluating = {"eval_dataloader": rows, "eval_interval": evaluate} if evaluate else {}
    trainer = Trainer(
        model=model, train_dataloader=rows, max_duration=f"{EPOCHS}ep", algorithms=[ema], device="cpu",
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0), progress_bar=False, **saving, **evaluating,
    )  # fmt: skip
    trainer.fit()
    after = round(model.weight.item(), 2)
    trainer.eval(eval_dataloader=rows)
    evaluated, end = model.evaluated[-1], round(model.weight.item(), 2)
    trainer.close()
    print(
        f"saved every {save}, evaluated every {evaluate}: weight {after} after training; an evaluation takes {evaluated} "
        f"and leaves {end}"
    )
    return after, evaluated, end


TRAINED, AVERAGE = 12, 9.64
for save, evaluate, expected in (
    (None, None, TRAINED),
    (None, "1ep", TRAINED),
    ("1ep", None, AVERAGE),
    ("1ep", "1ep", AVERAGE),
    ("5ba", None, AVERAGE),
    ("5ba", "1ep", AVERAGE),
    ("2ba", "1ep", TRAINED),
    ("2ba", "4ba", AVERAGE),
):
    assert run(save, evaluate) == (expected, AVERAGE, TRAINED), "the behaviour has changed"
PY
