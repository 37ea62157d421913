#!/bin/sh
# Question: torch's FlopCounterMode counts the FLOPs of a mixture of experts of transformers. Is that all of its
#   products?
# Guess: yes. Experts are matrix products, in whichever way they are implemented.
# Seen (torch 2.13.0, transformers 5.23.0, CPU): the experts count as zero. transformers 5 computes them by grouped
#   products (torch.nn.functional.grouped_mm), for which the counter has no formula, and it says nothing. With
#   set_experts_implementation("batched_mm"), the same model has 2.3 times as many. On the CPU, attention counts as zero
#   too. A compiled function counts as it does in eager mode.
# Hurts: FLOPs and MFU of mixtures of experts, and comparisons of dense and sparse models at equal FLOPs: a change of
#   the implementation changes them, without a message.
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
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

tokens, hidden, inner, layers, active = 128, 64, 64, 2, 2
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": active}
model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
rows = torch.randint(0, 64, (1, tokens))


def flops(call):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


seen, outputs = {}, []
for implementation in (None, "batched_mm"):
    if implementation:
        model.set_experts_implementation(implementation)
    name = model.config._experts_implementation
    seen[name] = flops(lambda: model(rows))
    outputs.append(model(rows).logits)
    print(f"experts by {name}: {seen[name]:,} FLOPs")
torch.testing.assert_close(*outputs)
experts = layers * active * tokens * 3 * 2 * hidden * inner
print(f"products of the experts: {experts:,}")
query = torch.randn(1, 4, 128, 32)
attention = flops(lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query))
print(f"attention on the CPU: {attention:,}, of {4 * 4 * 128 * 128 * 32:,}")
assert list(seen) == ["grouped_mm", "batched_mm"] and seen["batched_mm"] > experts
assert seen["batched_mm"] - seen["grouped_mm"] == experts and attention == 0, "the behaviour has changed"
PY
