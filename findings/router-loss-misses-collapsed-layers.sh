#!/bin/sh
# Question: mixtures of experts of transformers have a load-balancing loss for their routers, as in Switch Transformer.
#   A model has four layers of four experts. Each layer sends all of its tokens to one expert, layer i to expert i. What
#   is the loss?
# Guess: close to 4, its largest value. Layers are balanced one by one, and the loss is the mean over layers.
# Seen (transformers 5.23.0: Mixtral, Qwen3-MoE, OLMoE, gpt-oss): 1, its smallest value, and its gradient is zero.
#   Tokens and probabilities are counted over all layers together, before they are multiplied. A balanced model has the
#   same loss. If all layers choose the same expert, it is 3.8, as expected.
# Hurts: pretraining of mixtures of experts with transformers. The loss is at its minimum although layers have
#   collapsed; the logged number hides it, and nothing pushes the layer's other experts back into use.
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
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe

tokens, experts = 1000, 4


def prefer(expert):
    """Router logits of a layer that sends every token to one expert."""
    logits = torch.full((tokens, experts), -2.0)
    logits[:, expert] = 2.0
    return logits.requires_grad_()


torch.manual_seed(0)
cases = {
    "every layer balanced": [torch.randn(tokens, experts, requires_grad=True) for _ in range(4)],
    "all layers use expert 0": [prefer(0) for _ in range(4)],
    "layer i uses expert i": [prefer(layer) for layer in range(4)],
}
for module in (modeling_mixtral, modeling_qwen3_moe, modeling_olmoe, modeling_gpt_oss):
    seen = {}
    for name, layers in cases.items():
        loss = module.load_balancing_loss_func(tuple(layers), experts, top_k=1)
        each = sum(module.load_balancing_loss_func((layer,), experts, top_k=1) for layer in layers) / 4
        gradients = torch.autograd.grad(loss, layers), torch.autograd.grad(each, layers)
        norms = [torch.stack([part.norm() for part in gradient]).norm().item() for gradient in gradients]
        seen[name] = round(loss.item(), 2), round(each.item(), 2), norms[0]
        print(f"{module.__name__.split('.')[-1]}, {name}: loss {loss:.3f}, gradient {norms[0]:.1e}; "
              f"mean of the layers' own losses {each:.3f}, gradient {norms[1]:.1e}")
    collapsed = seen["layer i uses expert i"]
    assert seen["all layers use expert 0"][0] > 3.5 and collapsed[1] > 3.5
    assert collapsed[0] == 1 and collapsed[2] < 1e-6, "the behaviour has changed"
PY
