#!/bin/sh
# Question: a Composer run with CosineAnnealingWithWarmupScheduler(t_warmup="4ba", scale_warmup=True) is made twice as long
#   by Trainer(scale_schedule_ratio=2). When does the warm-up end?
# Guess: after 8 batches, at the full rate. scale_warmup is documented as "SSR also scales the warmup period".
# Seen (mosaicml 0.32.1, torch 2.7.0): after 4 batches, at half the rate, from where it jumps to the full rate. The slope of
#   the warm-up is scaled, and its end is not. With a ratio of 0.5, the rate is full after 2 batches, and stays there until
#   the decay begins, after 4. The schedulers with linear, polynomial, constant and stepped rates do the same. Without
#   scale_warmup, the warm-up has t_warmup and no jump. There is no message. An open pull request, 3941, has a fix.
# Hurts: scaled copies of a run, as for scaling laws or short tests of long runs: the long ones jump to the full rate early,
#   which the warm-up was to avoid, and the short ones hold it for too long.
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
from composer.models import ComposerModel
from composer.optim import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialWithWarmupScheduler,
)

WARM_UP, BATCHES = 4, 40


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
    """The rate of each batch. Composer's schedules are one batch late: the rate of batch 1 is that of time 0."""

    def __init__(self):
        self.seen = []

    def batch_start(self, state, logger):
        self.seen.append(state.optimizers[0].param_groups[0]["lr"])


def rates(schedule, ratio):
    """The rates by time, from 0 on."""
    model, seen = Counter(), Rates()
    trainer = Trainer(
        model=model, train_dataloader=torch.utils.data.DataLoader(torch.zeros(BATCHES, 1)), max_duration=f"{BATCHES}ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0), schedulers=schedule, callbacks=[seen], device="cpu",
        progress_bar=False, scale_schedule_ratio=ratio,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    return seen.seen[1:]


def shown(values):
    return " ".join(format(value, ".3g") for value in values[:10])


for scheduler, settings in (
    (CosineAnnealingWithWarmupScheduler, {}),
    (LinearWithWarmupScheduler, {}),
    (PolynomialWithWarmupScheduler, {}),
    (ConstantWithWarmupScheduler, {}),
    (MultiStepWithWarmupScheduler, {"milestones": ["30ba"]}),
):
    name = scheduler.__name__.removesuffix("Scheduler")
    for ratio in (1, 2, 0.5):
        seen = rates(scheduler(t_warmup=f"{WARM_UP}ba", scale_warmup=True, **settings), ratio)
        print(f"{name}, ratio {ratio}: {shown(seen)}")
        slope = [min(1.0, time / WARM_UP / ratio) for time in range(WARM_UP)] + [1.0]
        assert all(abs(a - b) < 1e-6 for a, b in zip(seen, slope)), "the behaviour has changed"
    plain = rates(scheduler(t_warmup=f"{WARM_UP}ba", **settings), 2)
    print(f"{name}, ratio 2, scale_warmup=False: {shown(plain)}")
    assert all(abs(rate - time / WARM_UP) < 1e-6 for time, rate in enumerate(plain[: WARM_UP + 1]))
PY
