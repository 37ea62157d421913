#!/bin/sh
# Question: a model scores 20 candidates for each of 50 queries. torchmetrics computes the mean reciprocal rank and the mean
#   average precision of the right one, once from probabilities, and once from their logarithms. Do they differ?
# Guess: no. Ranks do not change under a rising function.
# Seen (torchmetrics 1.9.0, torch 2.13.0): of log-probabilities, both are 0, and so are precision and recall among the first
#   five. For logits of mean 0, MRR is 0.373 instead of 0.389, and with 1 subtracted from all scores 0.322. RetrievalMRR,
#   RetrievalMAP, RetrievalPrecision and RetrievalRecall take a right answer whose score is not above 0 for a wrong one;
#   nDCG and hit rate go by the ranks alone. There is no message. The documentation asks for "estimated probabilities of
#   each document to be relevant"; torchmetrics' pull request 3104 proposed it, since a score of 0 is no prediction.
# Hurts: rankings by log-likelihoods, logits, cosine similarities or negative distances: a better model can have a lower
#   MRR, because its scores of right answers are negative. Pass exp(scores) or a softmax.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import importlib.metadata

import torch
from torchmetrics.retrieval import (
    RetrievalHitRate,
    RetrievalMAP,
    RetrievalMRR,
    RetrievalNormalizedDCG,
    RetrievalPrecision,
    RetrievalRecall,
)

print("torchmetrics", importlib.metadata.version("torchmetrics"), "torch", torch.__version__)
torch.manual_seed(0)
queries, candidates = 50, 20
logits = torch.randn(queries, candidates)
logits[:, 7] += 1  # the right one
target = torch.zeros(queries, candidates, dtype=torch.long)
target[:, 7] = 1
index = torch.arange(queries).repeat_interleave(candidates)
ranks = (logits > logits[:, 7:8]).sum(1) + 1
true = (1 / ranks).mean().item()
print(f"mean reciprocal rank by hand: {true:.4f}")
metrics = {
    "MRR": RetrievalMRR(),
    "MAP": RetrievalMAP(),
    "nDCG": RetrievalNormalizedDCG(),
    "hit rate": RetrievalHitRate(top_k=5),
    "precision": RetrievalPrecision(top_k=5),
    "recall": RetrievalRecall(top_k=5),
}
seen = {}
for name, scores in (
    ("probabilities", logits.softmax(1)),
    ("log-probabilities", logits.log_softmax(1)),
    ("logits", logits),
    ("logits - 1", logits - 1),
    ("logits + 10", logits + 10),
):
    seen[name] = {}
    for key, metric in metrics.items():
        metric.reset()
        seen[name][key] = round(metric(scores.flatten(), target.flatten(), indexes=index).item(), 4)
    print(f"{name}: {seen[name]}")
for name in ("probabilities", "logits + 10"):
    assert abs(seen[name]["MRR"] - true) < 1e-3 and abs(seen[name]["MAP"] - true) < 1e-3
for key in ("nDCG", "hit rate"):
    assert len({values[key] for values in seen.values()}) == 1
for key in ("MRR", "MAP", "precision", "recall"):
    assert seen["log-probabilities"][key] == 0 < seen["probabilities"][key], "the behaviour has changed"
assert seen["logits - 1"]["MRR"] < seen["logits"]["MRR"] < true - 0.01, "the behaviour has changed"
PY
