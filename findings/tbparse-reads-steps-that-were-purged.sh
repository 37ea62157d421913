#!/bin/sh
# Question: a run wrote losses of steps 0 to 99, went back to its checkpoint at step 50, and opened its log with
#   SummaryWriter(folder, purge_step=50), which removes what follows. It has come to step 79. What does tbparse read?
# Guess: steps 0 to 79, each once, as TensorBoard shows them.
# Seen (tbparse 0.0.9, tensorboard 2.21.0, torch 2.13.0): 130 rows. Steps 50 to 79 come twice, and 80 to 99 are those that
#   the run has left, so that the last row by step is one of them. TensorBoard and its EventAccumulator drop steps from 50
#   on when they read the purge; tbparse reads the events of each file itself, and has no setting for it. Without
#   purge_step, TensorBoard shows all 130 as well.
# Hurts: tables and figures made from TensorBoard's logs: means, best and last values of a run that was resumed contain
#   steps that its weights have never seen. Keep the last row of each step in the order of wall_time, up to the last step.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile tbparse==0.0.9 tensorboard==2.21.0 torch==2.13.0 pandas==3.1.1 \
    numpy==2.4.6 setuptools==80.10.2
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import logging
import sys
import time
from importlib.metadata import version

from tbparse import SummaryReader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

logging.disable(logging.WARNING)
print(", ".join(f"{name} {version(name)}" for name in ("tbparse", "tensorboard", "torch")))


def run(folder, purge_step):
    """The number of rows, of repeated steps and the last step, by TensorBoard and by tbparse."""
    for steps, purge in ((range(100), None), (range(50, 80), purge_step)):
        writer = SummaryWriter(folder, purge_step=purge)
        for step in steps:
            writer.add_scalar("loss", 4 - 0.01 * step, step)
        writer.close()
        time.sleep(1.1)  # files are named by the second
    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    seen = {
        "TensorBoard": [event.step for event in events.Scalars("loss")],
        "tbparse": SummaryReader(folder).scalars.query("tag == 'loss'")["step"].tolist(),
    }
    for name, steps in seen.items():
        print(f"purge_step={purge_step}, {name}: {len(steps)} rows, {len(steps) - len(set(steps))} steps twice, "
              f"largest step {max(steps)}")
    return seen


folder = sys.argv[1]
purged = run(f"{folder}/purged", 50)
kept = run(f"{folder}/kept", None)
assert purged["TensorBoard"] == list(range(80)) and len(kept["TensorBoard"]) == len(kept["tbparse"]) == 130
assert len(purged["tbparse"]) == 130 and max(purged["tbparse"]) == 99, "the behaviour has changed"
PY
