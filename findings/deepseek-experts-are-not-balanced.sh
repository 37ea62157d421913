#!/bin/sh
# Question: DeepSeek-V3 balances its experts without a loss: after a step, the bias of a busy expert falls and that of
#   an idle one rises. A model is pretrained with transformers' DeepseekV3ForCausalLM. Are its experts balanced?
# Guess: yes, in train mode. The model's page says that it "employs an auxiliary-loss-free strategy for load balancing".
# Seen (transformers 5.23.0): no. The bias is a buffer of zeros that nothing updates, and output_router_logits=True,
#   which the config and forward() accept, adds no loss and returns none. The same holds for GLM-4 MoE, dots.llm1, Solar
#   Open and EXAONE MoE; DeepSeek-V2, Hunyuan MoE and Llama 4 have no bias and no loss either, although Llama 4's config
#   has router_aux_loss_coef. Mixtral's loss changes, as it should.
# Hurts: pretraining and long continued training of these mixtures of experts: nothing keeps the router from using a few
#   experts, and nothing shows it. Update the bias after each step, or add a loss.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
sizes = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0,
    "n_shared_experts": 1, "mlp_layer_types": ["sparse"] * 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
with_bias = ("deepseek_v3", "glm4_moe", "dots1", "solar_open", "exaone_moe")
without_bias = ("deepseek_v2", "hunyuan_v1_moe", "llama4_text", "mixtral")
tokens = torch.randint(3, 64, (4, 32), generator=torch.Generator().manual_seed(0))
for family in with_bias + without_bias:
    names = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(family, **{name: size for name, size in sizes.items() if name in names})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    plain = model(input_ids=tokens, labels=tokens).loss.item()
    output = model(input_ids=tokens, labels=tokens, output_router_logits=True)
    with_router = output.loss.item()
    router_loss = getattr(output, "aux_loss", None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    largest = max((bias.abs().max().item() for bias in biases), default=None)
    print(f"{family}: loss {plain:.5f}, with router logits {with_router:.5f}, router loss "
          f"{None if router_loss is None else round(router_loss.item(), 3)}, largest bias after 5 steps {largest}")
    assert bool(biases) == (family in with_bias)
    if family == "mixtral":
        assert with_router > plain + 1e-4 and router_loss is not None
    else:
        assert router_loss is None and abs(with_router - plain) < 1e-6, "the behaviour has changed"
        assert not largest, "the behaviour has changed"
PY
