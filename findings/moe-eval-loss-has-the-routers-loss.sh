#!/bin/sh
# Question: a mixture of experts (output_router_logits=True, for its load-balancing loss) is evaluated: model.eval(),
#   and labels are given, as the Trainer does. Is the loss the cross-entropy?
# Guess: yes. The load-balancing loss is a term of training.
# Seen (transformers 5.23.0: Mixtral, Qwen3-MoE, OLMoE): no. It is part of the loss in eval mode too. Its smallest value
#   is not 0 or 1 but the number of experts per token: OLMoE with its default settings (8 experts, coefficient 0.01) has
#   an eval loss that is 0.08 nats too high, and a perplexity that is 8% too high. Mixtral's is 0.002 too high. With
#   output_router_logits=False the loss is the cross-entropy.
# Hurts: comparisons of mixtures of experts with dense models, or with other coefficients, by eval_loss or perplexity.
#   Lower coefficients look better than they are, and the eval loss changes with the balance.
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

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

logging.set_verbosity_error()
torch.manual_seed(0)
tokens = torch.randint(0, 64, (4, 32))
rows = [{"input_ids": row, "labels": row} for row in tokens]
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
arguments = TrainingArguments(sys.argv[1], use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=4)
excess = {}
for kind in ("mixtral", "qwen3_moe", "olmoe"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **heads, output_router_logits=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        output = model(input_ids=tokens, labels=tokens)
        entropy = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
    losses = []
    for model.config.output_router_logits in (True, False):
        losses.append(Trainer(model, arguments, eval_dataset=rows).evaluate()["eval_loss"])
    excess[kind] = losses[0] - entropy
    print(
        f"{kind}: cross-entropy {entropy:.4f}, eval_loss {losses[0]:.4f}, without router logits {losses[1]:.4f}; "
        f"coefficient {config.router_aux_loss_coef}, {config.num_experts_per_tok} experts per token, "
        f"router's loss {output.aux_loss:.3f}"
    )
    assert abs(losses[1] - entropy) < 1e-4
assert abs(excess["olmoe"] - 0.08) < 0.005 and abs(excess["mixtral"] - 0.002) < 5e-4, "the behaviour has changed"
PY
