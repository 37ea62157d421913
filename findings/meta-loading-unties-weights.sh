#!/bin/sh
# Question: a model's head shares the weight of its embedding. It is built on the meta device and gets its weights by
#   load_state_dict(assign=True), or by to_empty and a copy, as is usual for large models. Is the weight still shared?
# Guess: yes. The modules hold one parameter, and both ways fill it.
# Seen (torch 2.13.0): no. Each module gets a parameter of its own, without a message. After assign=True, the two still
#   share memory, so that the loaded model computes the same; but they have gradients and optimizer states of their own,
#   and both are stepped: AdamW moves the weight by up to two steps at once. After to_empty, the head is a weight of its
#   own. load_state_dict without assign keeps one. This has been reported to PyTorch's authors.
# Hurts: continued pretraining of models with tied weights. Tie them again after loading, and before the optimizer is
#   built. The pages on load_state_dict and to_empty do not mention it.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def step(model):
    before = model.head.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    logits = model(torch.arange(15))
    nn.functional.cross_entropy(logits, torch.arange(1, 16)).backward()
    optimizer.step()
    return (model.head.weight.detach() - before).abs().max().item()


torch.manual_seed(0)
source = Model()
weights = {name: tensor.clone() for name, tensor in source.state_dict().items()}
weights["head.weight"] = weights["embedding.weight"]  # as torch.load returns them


def meta():
    with torch.device("meta"):
        return Model()


copied, assigned, emptied = Model(), meta(), meta().to_empty(device="cpu")
copied.load_state_dict(weights)
assigned.load_state_dict(weights, assign=True)
emptied.load_state_dict(weights)
seen = {}
for name, model in (("copied", copied), ("assign=True", assigned), ("to_empty", emptied)):
    one = model.head.weight is model.embedding.weight
    memory = model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    seen[name] = one, memory, step(model)
    print(f"{name}: one parameter: {one}, same memory: {memory}, first step of AdamW: up to {seen[name][2]:.4f}")
assert seen["copied"][:2] == (True, True)
assert seen["assign=True"][:2] == (False, True), "the behaviour has changed"
assert seen["to_empty"][:2] == (False, False), "the behaviour has changed"
assert seen["assign=True"][2] > 1.9 * seen["copied"][2], "the behaviour has changed"
PY
