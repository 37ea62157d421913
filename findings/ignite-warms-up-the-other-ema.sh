#!/bin/sh
# Question: two moving averages of a model's weights by PyTorch-Ignite: EMAHandler(model, momentum=0.001), attached to the
#   trainer with the default name, and EMAHandler(model, momentum=0.01, momentum_warmup=0.5, warmup_iters=100), attached
#   with name="fast". Which momentum has each of them?
# Guess: the first 0.001 throughout, and the second begins with 0.5 and reaches 0.01 after 100 iterations.
# Seen (pytorch-ignite 0.5.5, torch 2.13.0): the first warms up from 0.5 and stays at 0.01, and the second has 0.01 from the
#   first iteration on. The warm-up sets engine.state.ema_momentum, the default name, whatever the name of its handler.
#   There is no message. Without another handler of the default name, the warm-up of "fast" has no effect, and a warning
#   says that the scheduler will create ema_momentum. One handler with the default name is right. The main branch has a fix.
# Hurts: runs that compare averages: the slow one is a fast one, and without its warm-up the other is still near the first
#   weights. Give the default name to the handler that has a warm-up, and no warm-up to the others.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 pytorch-ignite==0.5.5 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import warnings

import torch
from ignite.engine import Engine, Events
from ignite.handlers import EMAHandler

ITERATIONS, WARM_UP = 200, 100
SLOW, FAST = {"momentum": 0.001}, {"momentum": 0.01, "momentum_warmup": 0.5, "warmup_iters": WARM_UP}


def run(handlers):
    """The momentum of each handler after each iteration, its average after the last, and the number of warnings."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    @torch.no_grad()
    def step(engine, batch):
        model.weight.fill_(1.0)  # trained at once: an average is the share of the first weights that is gone

    trainer = Engine(step)
    attached = {name: EMAHandler(model, **settings) for name, settings in handlers.items()}
    seen = {name: [] for name in handlers}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, handler in attached.items():
            handler.attach(trainer, name=name)
        for name in handlers:
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED, lambda engine, name=name: seen[name].append(getattr(engine.state, name))
            )
        trainer.run(range(ITERATIONS))
    averages = {name: handler.ema_model.weight.item() for name, handler in attached.items()}
    for name, momenta in seen.items():
        print(
            f"{' and '.join(handlers)}: {name} has momentum {momenta[0]:.3g} at first, {momenta[-1]:.3g} at the end, "
            f"average {averages[name]:.3f}; {len(caught)} warnings"
        )
    return {name: (round(momenta[0], 6), round(momenta[-1], 6)) for name, momenta in seen.items()}, averages, len(caught)


momenta, averages, _ = run({"ema_momentum": FAST})
assert momenta["ema_momentum"] == (0.5, 0.01) and averages["ema_momentum"] > 0.999
momenta, averages, _ = run({"ema_momentum": SLOW})
assert momenta["ema_momentum"] == (0.001, 0.001) and averages["ema_momentum"] < 0.2
momenta, averages, _ = run({"fast": FAST})
assert momenta["fast"] == (0.01, 0.01), "the behaviour has changed"
momenta, averages, warned = run({"ema_momentum": SLOW, "fast": FAST})
assert momenta == {"ema_momentum": (0.5, 0.01), "fast": (0.01, 0.01)} and warned == 0, "the behaviour has changed"
assert averages["ema_momentum"] > 0.999 and averages["fast"] < 0.9, "the behaviour has changed"
PY
