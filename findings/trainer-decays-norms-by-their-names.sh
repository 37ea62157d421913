#!/bin/sh
# Question: transformers' Trainer applies weight decay, as is usual, to all parameters but biases and norms. An own model
#   has torch.nn.RMSNorm layers, ln_1 and ln_2. Do they decay? And the last norm of a Mamba of transformers, and its A_log
#   and D, which Mamba's authors exempt from weight decay?
# Guess: none of them does. RMSNorm is to a Llama what LayerNorm is to GPT-2.
# Seen (transformers 5.23.0): all of them do. The Trainer knows nn.LayerNorm by its class, and all other norms by their
#   names: layernorm, rmsnorm, or a name with "norm" at its end. So `norm` is left out, while `ln_1`, `norm_f` and `scale`
#   decay. In 1,000 steps at a rate of 1e-3 with weight_decay 0.1, a scale that gets no gradient falls from 1 to 0.90.
#   There is no message. A LayerNorm of the same name does not decay. The documentation says that "bias and LayerNorm
#   parameters" are excluded.
# Hurts: pretraining of own architectures and of state-space models: scales and A_log are pulled to zero, which changes what
#   a layer forgets, and a change from LayerNorm to RMSNorm also changes the weight decay. Override
#   get_decay_parameter_names.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
fi
"$PYTHON" - "$dir" <<'PY'
import sys

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(sys.argv[1], report_to=[], use_cpu=True, weight_decay=0.1)
sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}


def own(norm):
    return nn.ModuleDict({"ln_1": norm(32), "linear": nn.Linear(32, 32), "ln_2": norm(32)})


models = {
    "own model with LayerNorm": own(nn.LayerNorm),
    "own model with RMSNorm": own(nn.RMSNorm),
    "Llama": LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, num_attention_heads=2)),
    "Mamba": MambaForCausalLM(MambaConfig(**sizes)),
    "Mamba 2": Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=4, head_dim=16, n_groups=1)),
}
seen = {}
for name, model in models.items():
    trainer = Trainer(model, arguments)
    group = next(group for group in trainer.create_optimizer().param_groups if group["weight_decay"] > 0)
    decayed = {id(parameter) for parameter in group["params"]}
    vectors = {
        parameter_name.removesuffix(".weight").split(".")[-1]: id(parameter) in decayed
        for parameter_name, parameter in model.named_parameters()
        if not parameter_name.endswith("bias") and (parameter.dim() == 1 or parameter_name.endswith("A_log"))
    }
    seen[name] = [vector for vector, decays in vectors.items() if decays]
    print(f"{name}: of {', '.join(vectors)} decay: {', '.join(seen[name]) or 'none'}")
assert seen["own model with LayerNorm"] == seen["Llama"] == []
assert seen["own model with RMSNorm"] == ["ln_1", "ln_2"], "the behaviour has changed"
for name in ("Mamba", "Mamba 2"):
    assert {"A_log", "D", "norm_f"} <= set(seen[name]), "the behaviour has changed"
PY
