#!/bin/sh
# Question: LoRA is to train the experts of the last layer of a mixture only. Experts are parameters in transformers 5, so
#   PEFT takes them by target_parameters; the layer is chosen by layers_to_transform=[1], or the others are left out by
#   exclude_modules. Which layers are trained?
# Guess: the last one, as with target_modules; or PEFT refuses the options together, as it refuses dropout, DoRA and
#   biases for parameters.
# Seen (peft 0.21.2, transformers 5.24.0, CPU): the experts of all layers. layers_to_transform and exclude_modules are
#   ignored for target_parameters, without a message; the adapter's config keeps them, and so says what was not done.
#   Attention matrices of the same adapter (target_modules) follow both options. What works is the layer in the name:
#   target_parameters=["layers.1.mlp.experts.gate_up_proj"].
# Hurts: memory and time (in a model of 48 layers, 48 times the trained weights that were asked for), and studies of which
#   layers learn: layers that should have been frozen are trained.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

config = Qwen3MoeConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)  # fmt: skip
tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
both = dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
cases = {  # the options, and whether the experts of layer 0 are trained
    "layers_to_transform=[1]": (both | dict(layers_to_transform=[1]), True),
    "exclude_modules, layer 0": (both | dict(exclude_modules=r".*layers\.0\..*"), True),
    "the layer in the name": (
        dict(target_modules=["layers.1.self_attn.q_proj"], target_parameters=["layers.1.mlp.experts.gate_up_proj"]), False,
    ),
}  # fmt: skip
for name, (options, trained) in cases.items():
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        model = get_peft_model(Qwen3MoeForCausalLM(config), LoraConfig(r=4, **options))
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
        before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    changed = [key for key, weight in model.named_parameters() if not torch.equal(weight, before[key])]
    counts = {
        (part, layer): sum(f"layers.{layer}." in key and part in key for key in changed)
        for part in ("q_proj", "experts") for layer in (0, 1)
    }  # fmt: skip
    told = [str(message.message) for message in messages if "layer" in str(message.message)]
    print(f"{name}: trained matrices by part and layer: {counts}; messages about layers: {told}")
    assert not counts["q_proj", 0] and counts["q_proj", 1] and counts["experts", 1]
    assert bool(counts["experts", 0]) == trained, "the behaviour has changed"
PY
