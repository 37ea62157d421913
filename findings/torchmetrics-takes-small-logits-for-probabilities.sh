#!/bin/sh
# Question: a classifier of documents gives logits, and torchmetrics' BinaryAccuracy or BinaryAUROC gets them batch by
#   batch; both accept logits, as documented. Does the result depend on the batch size?
# Guess: no. A metric keeps its state over all batches, so that the result is that of one large batch.
# Seen (torchmetrics 1.9.0, torch 2.13.0): yes. A batch is taken for logits, and gets a sigmoid, only if one of its
#   numbers is outside [0, 1]. A batch of logits that are all inside is taken for probabilities. With one document
#   a batch, a logit of 0.3 is then a negative, and AUROC falls from 0.750 to 0.711, as half of the scores are squashed
#   and others are not; accuracy falls from 0.683 to 0.659. With 2 documents, it is 0.735; with 16, right. Nothing warns.
# Hurts: scores of probes, quality classifiers and reward models with small batches or small logits, as early in training
#   or with documents of many tokens one by one. Apply the sigmoid before.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import warnings

import torch
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

warnings.simplefilter("error")
generator = torch.Generator().manual_seed(0)
labels = torch.randint(0, 2, (4_000,), generator=generator)
logits = torch.randn(4_000, generator=generator) + labels - 0.5


def score(metric, scores, batch_size):
    for rows, targets in zip(scores.split(batch_size), labels.split(batch_size), strict=True):
        metric.update(rows, targets)
    return metric.compute().item()


seen = {}
for kind in (BinaryAccuracy, BinaryAUROC):
    sigmoid = score(kind(), logits.sigmoid(), 1)
    seen[kind] = [score(kind(), logits, size) - sigmoid for size in (1, 2, 4, 16, 4_000)]
    values = ", ".join(f"{sigmoid + change:.4f}" for change in seen[kind])
    print(f"{kind.__name__} by batches of 1, 2, 4, 16, 4,000: {values}; of probabilities, by batches of 1: {sigmoid:.4f}")
    assert abs(seen[kind][-1]) < 1e-6
    assert seen[kind][0] < -0.02, "the behaviour has changed"
PY
