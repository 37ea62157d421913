#!/bin/sh
# Question: accelerate names checkpoints itself (automatic_checkpoint_naming=True, total_limit=3). A run stops after
#   ten, resumes with load_state(), saves five more, stops, and resumes again. Which checkpoint does it load?
# Guess: the newest, the fifteenth. Without a folder, load_state() picks up from the latest, as its documentation says.
# Seen (accelerate 1.15.0): the tenth. load_state() does not set the counter of names, so the resumed run begins again
#   at checkpoint_0. Each save deletes the folder with the lowest number, which is the one before it, so the old
#   checkpoints 8 and 9 stay, and load_state() takes the highest number. Without total_limit, the first save fails
#   because its folder exists, and asks for the counter to be set by hand.
# Hurts: jobs that are stopped and resumed by a scheduler. Each time, all training since the first resumption is lost,
#   and the run repeats it. Set project_configuration.iteration after load_state().
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 accelerate==1.15.0
fi
cat > "$dir/run.py" <<'PY'
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

folder, resume, saves = Path(sys.argv[1]), sys.argv[2] == "resume", int(sys.argv[3])
names = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(cpu=True, project_config=names)
model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
torch.nn.init.zeros_(model.weight)  # counts the saves
if resume:
    accelerator.load_state()
first = int(model.weight.item())
for _ in range(saves):
    with torch.no_grad():
        model.weight += 1
    accelerator.save_state()
left = sorted(path.name for path in (folder / "checkpoints").iterdir())
print(f"begins at save {first}, ends at save {int(model.weight.item())}; folders: {', '.join(left)}")
(folder / "first").write_text(str(first))
PY
"$PYTHON" "$dir/run.py" "$dir" start 10
"$PYTHON" "$dir/run.py" "$dir" resume 5
"$PYTHON" "$dir/run.py" "$dir" resume 0
test "$(cat "$dir/first")" = 10 || { echo "the behaviour has changed"; exit 1; }
