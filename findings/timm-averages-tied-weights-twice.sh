#!/bin/sh
# Question: timm's ModelEmaV3 keeps a moving average of a model whose head shares the weight of its embedding, with a
#   decay of 0.9. Has the shared weight the same decay as the others?
# Guess: yes. It is one tensor in the model and in its copy.
# Seen (timm 1.0.31): no, it has 0.81. The average goes through the state dicts, where a shared weight has two names,
#   and updates it once for each. With a decay of 0.9999, the shared weight averages over 5,000 steps and the others
#   over 10,000. ModelEmaV2 does the same. torch.optim.swa_utils.AveragedModel updates it once.
# Hurts: averages of language models, whose embedding is often their largest matrix: the average mixes a younger
#   embedding with older layers. There is no message.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
  "$PYTHON" -m pip install --quiet --no-compile --no-deps timm==1.0.31
fi
"$PYTHON" - <<'PY'
import importlib.util
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# timm.utils.model_ema by its file: importing timm itself needs torchvision.
package = Path(importlib.util.find_spec("timm").origin).parent
spec = importlib.util.spec_from_file_location("model_ema", package / "utils" / "model_ema.py")
model_ema = importlib.util.module_from_spec(spec)
spec.loader.exec_module(model_ema)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layer = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight


def fill(model, value):
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(value)


seen = {}
for name in ("ModelEmaV2", "ModelEmaV3", "AveragedModel"):
    model = Model()
    fill(model, 0.0)
    if name == "AveragedModel":
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        average.update_parameters(model)  # the first update copies
        update = average.update_parameters
    else:
        average = getattr(model_ema, name)(model, decay=0.9)
        update = average.update
    assert average.module.head.weight is average.module.embedding.weight
    fill(model, 1.0)
    update(model)
    seen[name] = [round(1 - w.mean().item(), 3) for w in (average.module.layer.weight, average.module.head.weight)]
    print(f"{name}: decay of the layer {seen[name][0]}, of the shared weight {seen[name][1]}")
assert seen["AveragedModel"] == [0.9, 0.9]
for name in ("ModelEmaV2", "ModelEmaV3"):
    assert seen[name] == [0.9, 0.81], "the behaviour has changed"
PY
