#!/bin/sh
# Question: texts of different lengths are padded on the left and generated or scored in one batch by DeepSeek-V4, with
#   their attention mask and positions. Has each row the logits that it has alone?
# Guess: yes, as with DeepSeek-V3.2 and every model with attention only: the mask hides the padding.
# Seen (torch 2.13.0, transformers 5.24.0): no. The layers that compress keys and values, 4 or 128 tokens into one entry,
#   never get the mask. They compress the padding as well, cut their blocks from the first padding token on, and count them
#   by positions that do not count the padding, so a token sees blocks of padding instead of the latest blocks of its own
#   text. One padding token changes logits by up to 1.6 standard deviations, 128 by 5.7, and greedy texts differ. There is
#   no message. Padding on the right is right.
# Hurts: batched generation, evaluation by generation and reinforcement learning with DeepSeek-V4: all texts but the longest
#   of a batch are wrong, the more the shorter they are, and answers depend on what else is in the batch.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0
fi
"$PYTHON" -W ignore - <<'PY'
import torch
import transformers
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV32Config, LlamaConfig

transformers.logging.set_verbosity_error()  # kernels that are not installed
base = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": None}
experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
v4 = {"head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 16}
latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
v32 = {**latent, "n_group": 1, "topk_group": 1, "index_n_heads": 16, "index_head_dim": 16, "intermediate_size": 96}
configs = {
    "DeepSeek-V4": DeepseekV4Config(**base, **experts, **v4, num_hidden_layers=6, sliding_window=16),
    "DeepSeek-V3.2": DeepseekV32Config(**base, **experts, **v32, num_hidden_layers=3),
    "Llama": LlamaConfig(**base, num_hidden_layers=3, intermediate_size=96),
}
text = torch.randint(2, 97, (1, 300), generator=torch.Generator().manual_seed(0))
print(f"transformers {transformers.__version__}: errors of logits in the padded row, in standard deviations")
for name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.1)
        alone = model(text).logits[0]
    errors = {}
    for pads in (0, 1, 4, 128):
        tokens = torch.cat([torch.zeros(1, pads, dtype=torch.long), text], dim=1)
        mask = torch.cat([torch.zeros(1, pads, dtype=torch.long), torch.ones_like(text)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # as generate gives them
        with torch.no_grad():
            padded = model(tokens, attention_mask=mask, position_ids=positions).logits[0, pads:]
        errors[pads] = float((padded - alone).abs().max() / alone.std())
    print(f"{name:13}", *(f"{pads} pads {error:.5f}," for pads, error in errors.items()), end=" ")
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    texts = [
        model.generate(ids, attention_mask=ids.ne(0).long(), **options)[0, -8:].tolist()
        for ids in (text[:, :40], torch.cat([torch.zeros(1, 5, dtype=torch.long), text[:, :40]], dim=1))
    ]
    print("generate, alone and padded by 5:", *texts)
    assert errors[0] < 1e-3
    for pads in (1, 4, 128):
        assert (errors[pads] > 0.3) == (name == "DeepSeek-V4"), "the behaviour has changed"
    assert (texts[0] == texts[1]) == (name != "DeepSeek-V4"), "the behaviour has changed"
PY
