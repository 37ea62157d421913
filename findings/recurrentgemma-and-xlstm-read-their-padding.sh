#!/bin/sh
# Question: prompts of different lengths are padded on the left to one batch, as `generate` needs it, with the mask of the
#   tokenizer. Does a recurrent model still answer each prompt as it does alone?
# Guess: yes. It takes an `attention_mask`, and Mamba, which has no attention either, uses it to leave padding out.
# Seen (torch 2.13.0, transformers 5.24.0): Mamba, Mamba-2, Jamba and Falcon-H1 do, to 1e-3. RecurrentGemma and xLSTM do
#   not: they accept the mask, but their recurrent layers read the padding as text. After three padding tokens the logits
#   are off by 1.2 and 1.8 standard deviations, RecurrentGemma's with correct `position_ids`, too. Nothing is printed; an
#   RWKV warns.
# Hurts: everyone who generates with, or evaluates, these models in batches: a prompt's answer depends on the longest one
#   beside it, so scores change with the batch size, and only those of batch size 1 are the model's.
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
from transformers import AutoModelForCausalLM, FalconH1Config, JambaConfig, Mamba2Config, MambaConfig
from transformers import RecurrentGemmaConfig, xLSTMConfig

base = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": None}
attention = {"num_attention_heads": 4, "intermediate_size": 96}
mamba2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
configs = {
    "Mamba": MambaConfig(**base, state_size=8),
    "Mamba-2": Mamba2Config(**base, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=8),
    "Jamba": JambaConfig(
        **base, **attention, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2
    ),
    "Falcon-H1": FalconH1Config(**base, **attention, **mamba2, num_key_value_heads=2, mamba_d_ssm=128),
    "RecurrentGemma": RecurrentGemmaConfig(**base, **attention, lru_width=64, attention_window_size=32),
    "xLSTM": xLSTMConfig(**base, num_heads=4),
}
short, long = (torch.randint(2, 97, (1, length), generator=torch.Generator().manual_seed(length)) for length in (12, 15))
batch = torch.cat([torch.nn.functional.pad(short, (3, 0)), long])
mask = torch.ones_like(batch)
mask[0, :3] = 0
print(f"transformers {transformers.__version__}: logits of a prompt in a batch against alone, in standard deviations")
for name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
        inputs = {"attention_mask": mask, "use_cache": False}
        if name in ("Jamba", "Falcon-H1", "RecurrentGemma"):
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        both = model(batch, **inputs).logits[:, -1]
        alone = [model(ids, use_cache=False).logits[0, -1] for ids in (short, long)]
    off = [float((row - expected).abs().max() / expected.std()) for row, expected in zip(both, alone)]
    print(f"{name:15} with three padding tokens {off[0]:.4f}, without padding {off[1]:.4f}")
    assert off[1] < 1e-3, "the row without padding differs as well"
    assert (off[0] > 0.1) == (name in ("RecurrentGemma", "xLSTM")), "the behaviour has changed"
PY
