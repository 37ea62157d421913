#!/bin/sh
# Question: transformers' Trainer reports total_flos of a run. A mixture of experts is trained with 1 of 8 experts per
#   token, and with all 8. How do the FLOPs differ?
# Guess: by nearly a factor of 8 in the experts. A token only passes through the experts that are chosen.
# Seen (transformers 5.23.0): not at all. total_flos is 6 times the tokens times all parameters but the embeddings,
#   experts that a token does not use included: below, 6 times the FLOPs of the parameters in use. Mixtral, Qwen3-MoE
#   and OLMoE are the same. The documentation says that the formula has to be overridden for models that use parameters
#   again; it does not mention models that use only some.
# Hurts: comparisons of mixtures of experts with dense models at equal FLOPs, and loss curves over FLOPs: a mixture
#   seems to need several times the compute that it needs.
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

from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
rows = [{"input_ids": list(range(32)), "labels": list(range(32))}] * 8
options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 1}
for kind, config, experts in (
    (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 8}),
    (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 8}),
    (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"num_experts": 8, "moe_intermediate_size": 256}),
):
    flops = {}
    for active in (1, 8):
        model = kind(config(**sizes, **experts, num_experts_per_tok=active))
        trainer = Trainer(model, TrainingArguments(f"{sys.argv[1]}/run", **options), train_dataset=rows)
        trainer.train()
        flops[active] = trainer.state.total_flos
    of_experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    used = 6 * 8 * 32 * (model.num_parameters(exclude_embeddings=True) - of_experts * 7 // 8)
    print(f"{kind.__name__}: total_flos {flops}, of the parameters used with 1 of 8: {used}, {flops[1] / used:.1f} times")
    assert flops[1] == flops[8] and flops[1] > 3 * used, "the behaviour has changed"
PY
