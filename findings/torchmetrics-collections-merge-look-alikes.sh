#!/bin/sh
# Question: a torchmetrics.MetricCollection computes two perplexities on the validation set, Perplexity() and
#   Perplexity(ignore_index=0), where token 0 is padding. The first batch has no padding. What does it return?
# Guess: each metric's own value, as without the collection.
# Seen (torchmetrics 1.9.0, torch 2.13.0): the first one twice, 89.99 and 89.99 instead of 89.99 and 91.60. After the first
#   update, the collection compares the metrics' states, puts those that are equal into one "compute group", and from then
#   on updates only one metric of each group. Metrics that differ only in ignore_index or threshold look alike if the first
#   batch does not tell them apart: F1 with thresholds 0.5 and 0.9 after a batch of confident answers becomes the same
#   number, 0.49 instead of 0.26. Nothing warns, and the documentation of compute_groups names it a way to save time. Users
#   met it in torchmetrics' issues 2596 and 2916, which are closed.
# Hurts: any collection with two settings of one metric, and it depends on the order of the batches: sorted by length, or
#   packed first, the difference vanishes. Set compute_groups=False.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryF1Score
from torchmetrics.text import Perplexity

torch.manual_seed(0)
text = [(torch.randn(4, 16, 50), torch.randint(1, 50, (4, 16))) for _ in range(4)]
for _, tokens in text[1:]:
    tokens[:, 4:] = 0
answers = [(torch.rand(64), torch.randint(0, 2, (64,))) for _ in range(4)]
answers[0] = torch.where(answers[0][0] > 0.5, 0.99, 0.01), answers[0][1]
cases = {
    "Perplexity, Perplexity(ignore_index=0)": (text, lambda: {"a": Perplexity(), "b": Perplexity(ignore_index=0)}),
    "F1 with thresholds 0.5, 0.9": (answers, lambda: {"a": BinaryF1Score(0.5), "b": BinaryF1Score(0.9)}),
}
for name, (batches, metrics) in cases.items():

    def compute(order, groups):
        collection = MetricCollection(metrics(), compute_groups=groups)
        for predicted, target in order:
            collection.update(predicted, target)
        return [round(value.item(), 4) for value in collection.compute().values()]

    merged, reverse, apart = compute(batches, True), compute(batches[::-1], True), compute(batches, False)
    print(f"{name}: {merged}; batches in reverse {reverse}; compute_groups=False {apart}")
    assert reverse == apart and abs(apart[0] - apart[1]) > 0.01 * apart[0]
    assert merged[0] == merged[1] == apart[0], "the behaviour has changed"
PY
