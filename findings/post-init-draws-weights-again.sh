#!/bin/sh
# Question: an own model class of transformers (a PreTrainedModel) sets its output projections to zero in __init__,
#   makes its other matrices orthogonal, and calls self.post_init() at the end, as every class has to. How does it begin?
# Guess: so. The class has no _init_weights, so post_init has nothing to do to the weights.
# Seen (transformers 5.23.0): every Linear and Embedding is drawn again from a normal distribution with a standard
#   deviation of 0.02, or config.initializer_range, and biases are set to zero. The base class has an _init_weights that
#   does so. Nothing is said when the model is built. Parameters that are not in such a layer stay as they are. An own
#   _init_weights that does nothing helps.
# Hurts: pretraining of own architectures with the Trainer: residual branches that should begin at zero, scaled or
#   orthogonal initialisation, and torch's own (nine times as large below) are lost without a message.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - <<'PY'
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class Config(PreTrainedConfig):
    model_type = "mine"


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.up, self.down = nn.Linear(10, 64), nn.Linear(64, 10, bias=False)
        self.mix, self.scale = nn.Linear(64, 64, bias=False), nn.Parameter(torch.full((10,), 0.1))
        nn.init.zeros_(self.down.weight)
        nn.init.orthogonal_(self.mix.weight)
        self.before = {name: weight.detach().clone() for name, weight in self.named_parameters()}
        self.post_init()


class Remedied(Model):
    def _init_weights(self, module):
        pass


torch.manual_seed(0)
seen = {}
for kind in (Model, Remedied):
    model = kind(Config())
    seen[kind] = {name for name, weight in model.named_parameters() if not torch.equal(weight, model.before[name])}
    stds = {name: f"{weight.std():.3f}" for name, weight in model.named_parameters()}
    print(f"{kind.__name__}: changed by post_init {sorted(seen[kind])}; standard deviations {stds}")
print(f"in __init__ they were { {name: f'{weight.std():.3f}' for name, weight in model.before.items()} }")
assert not seen[Remedied]
assert seen[Model] == {"up.weight", "up.bias", "down.weight", "mix.weight"}, "the behaviour has changed"
PY
