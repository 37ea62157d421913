#!/bin/sh
# Question: Composer trains for 5 epochs with a rate of 1 and SWA(swa_start="2ep", swa_end="4ep", schedule_swa_lr=True,
#   swa_lr=0.01, anneal_steps=2, update_interval="1ba"). Which rate has the run while the weights are averaged?
# Guess: it falls to 0.01 within two batches, as the documentation of swa_lr and torch's SWALR say.
# Seen (mosaicml 0.32.1, torch 2.7.0): 1 throughout, as without these settings, and swa_lr=100 changes nothing. The given
#   swa_lr is replaced by the rate that the run has when averaging starts, so that torch's SWALR anneals from that rate to
#   itself. A cosine schedule stays at the rate of that time, 0.65 here, whatever the swa_lr. There is no message about it.
# Hurts: SWA depends on the rate while the weights are averaged. A rate chosen for that phase, or a search over swa_lr, has
#   no effect, and weights that shall be averaged at a low rate are averaged at the high one of the run.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.7.0 mosaicml==0.32.1 numpy==2.2.6 setuptools
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
from composer import Callback, Trainer
from composer.algorithms import SWA
from composer.models import ComposerModel
from composer.optim import ConstantScheduler, CosineAnnealingScheduler

BATCHES, EPOCHS = 4, 5


class Counter(ComposerModel):
    """One weight, whose gradient is always -1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return self.weight

    def loss(self, outputs, batch):
        return -outputs


class Rates(Callback):
    """The rate of each batch."""

    def __init__(self):
        self.seen = []

    def batch_start(self, state, logger):
        self.seen.append(state.optimizers[0].param_groups[0]["lr"])


def rates(schedule, **settings):
    """The rate of each batch of a run that averages from the third epoch to the fourth."""
    model, seen = Counter(), Rates()
    swa = SWA(swa_start="2ep", swa_end="4ep", **settings)
    trainer = Trainer(
        model=model, train_dataloader=torch.utils.data.DataLoader(torch.zeros(BATCHES, 1)), max_duration=f"{EPOCHS}ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0), schedulers=schedule, algorithms=[swa],
        callbacks=[seen], device="cpu", progress_bar=False,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    assert swa.swa_started and swa.swa_completed
    return seen.seen


for name, schedule in (("no", None), ("a constant", ConstantScheduler()), ("a cosine", CosineAnnealingScheduler())):
    plain = rates(schedule, update_interval="1ba")
    seen = {
        rate: rates(schedule, schedule_swa_lr=True, swa_lr=rate, anneal_steps=2, update_interval="1ba")
        for rate in (0.01, 100.0)
    }
    for rate, values in {"none": plain, **seen}.items():
        print(f"{name} schedule, swa_lr {rate}: {' '.join(format(value, '.2g') for value in values)}")
    start, end = 2 * BATCHES, 4 * BATCHES
    expected = plain[start + 1] if name == "a cosine" else 1.0
    for values in seen.values():
        assert all(abs(value - expected) < 1e-6 for value in values[start + 1 : end]), "the behaviour has changed"
    assert seen[0.01] == seen[100.0], "the behaviour has changed"
PY
