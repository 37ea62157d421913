#!/bin/sh
# Question: an own model class (a PreTrainedModel, as with trust_remote_code) makes a buffer in __init__, here ALiBi's
#   slopes, with persistent=False, and a parameter that older checkpoints do not have, torch.ones. Which values do they
#   have after from_pretrained?
# Guess: those of __init__. Only what the checkpoint holds is replaced.
# Seen (transformers 5.23.0): what lay in memory: numbers that differ from load to load, such as -2e8 and 3e-41.
#   from_pretrained builds the model without memory and fills in the checkpoint, and the values of __init__ are never
#   computed. There is no message about the buffer, which was right in transformers 4.57; the parameter is reported as
#   "newly initialized". Both are right in a model that is made from its config. An own _init_weights that sets the two
#   helps. The part about buffers has been reported to transformers' authors.
# Hurts: own and published model code with masks, slopes, tables of positions or scales in such buffers. Memory is often
#   zero, or still holds the right numbers, so it works in a test, and fails later or elsewhere.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

logging.disable_progress_bar()


class Config(PreTrainedConfig):
    model_type = "mine"


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config, with_gain=False):
        super().__init__(config)
        self.project = nn.Linear(8, 8)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 9), persistent=False)
        if with_gain:
            self.gain = nn.Parameter(torch.ones(8))
        self.post_init()


class Remedied(Model):
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            nn.init.ones_(self.gain)
            self.slopes.copy_(2.0 ** -torch.arange(1, 9))


def use_memory():
    """Other tensors come and go, as in any program."""
    for _ in range(100):
        torch.randn(8)


def has_values_of_init(model):
    slopes = torch.equal(model.slopes, 2.0 ** -torch.arange(1, 9))
    return slopes, torch.equal(model.gain.detach(), torch.ones(8))


torch.manual_seed(0)
folder = f"{sys.argv[1]}/model"
Model(Config()).save_pretrained(folder)
seen = {"from its config": has_values_of_init(Model(Config(), with_gain=True))}
for name, kind in (("from_pretrained", Model), ("from_pretrained, with _init_weights", Remedied)):
    use_memory()
    model = kind.from_pretrained(folder, with_gain=True)
    seen[name] = has_values_of_init(model)
    print(f"{name}: slopes {model.slopes.tolist()[:4]}, gain {model.gain.tolist()[:4]}")
print(f"values of __init__ in (buffer, parameter): {seen}")
assert all(seen["from its config"]) and all(seen["from_pretrained, with _init_weights"])
assert not any(seen["from_pretrained"]), "the behaviour has changed"
PY
