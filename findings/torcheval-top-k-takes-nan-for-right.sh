#!/bin/sh
# Question: the logits of a model are NaN, or all equal. What are torcheval's top-5 accuracy, hit rate and mean reciprocal
#   rank of the next token, of 50,257?
# Guess: 0 or an error for NaN, and about 5 in 50,257 for equal logits.
# Seen (torcheval 0.0.7, torch 2.13.0): 1.0 by all three, for both. torcheval ranks the right class by the number of classes
#   that have a larger score. No comparison with NaN is true, and ties are decided for the right class. Top-1
#   accuracy, MulticlassAccuracy(k=1), takes the class with the largest score, and is 0.
# Hurts: curves of top-k accuracy, which jump to 100% where a run diverges, and rankings of retrieval; a best checkpoint
#   chosen by them is a broken one. torchmetrics' top_k picks k classes, and gives a broken model about 0.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torcheval==0.0.7 torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
import importlib.metadata

import torch
from torcheval.metrics import HitRate, MulticlassAccuracy, ReciprocalRank
from torchmetrics.functional.classification import multiclass_accuracy

print("torcheval", importlib.metadata.version("torcheval"), "torch", torch.__version__)
torch.manual_seed(0)
rows, classes = 500, 50_257
target = torch.randint(1000, classes, (rows,))
cases = {
    "NaN": torch.full((rows, classes), torch.nan),
    "all equal": torch.zeros(rows, classes),
    "random": torch.randn(rows, classes),
}
seen = {}
for name, scores in cases.items():
    metrics = {
        "top-5": MulticlassAccuracy(k=5, num_classes=classes),
        "hit rate": HitRate(k=5),
        "reciprocal rank": ReciprocalRank(),
        "top-1": MulticlassAccuracy(num_classes=classes),
    }
    seen[name] = {key: metric.update(scores, target).compute().mean().item() for key, metric in metrics.items()}
    other = multiclass_accuracy(scores, target, classes, average="micro", top_k=5).item()
    print(f"{name}: {({key: round(value, 4) for key, value in seen[name].items()})}; torchmetrics' top-5 {other:.4f}")
    assert other < 0.01 and seen[name]["top-1"] < 0.01
assert seen["random"]["top-5"] < 0.01
for name in ("NaN", "all equal"):
    assert seen[name]["top-5"] == seen[name]["hit rate"] == seen[name]["reciprocal rank"] == 1, "the behaviour has changed"
PY
