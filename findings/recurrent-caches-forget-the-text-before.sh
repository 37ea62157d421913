#!/bin/sh
# Question: a recurrent or hybrid model has read a text, and its cache is passed on with the next few tokens at once: the
#   next turn of a chat, the text after a shared prefix, the next chunk of a long prompt. Does the model still know the
#   text?
# Guess: yes. That is what the cache is for, and with one token at a time it is right.
# Seen (torch 2.13.0, transformers 5.24.0): Mamba, Falcon Mamba and Jamba begin again with an empty recurrent state if they
#   get more than one token; only the few last tokens that their convolutions hold, and Jamba's attention, remember. Their
#   logits are off by 0.4 to 0.8 standard deviations. Nothing is printed. Mamba-2, Falcon-H1 and Qwen3-Next are right to
#   1e-4. With Jamba, `generate(prefill_chunk_size=4)` so gives another text than `generate`.
# Hurts: everyone who reuses prefixes, goes on with a chat, scores answers after a cached question, or reads long prompts
#   in chunks with these models: answers and scores ignore what came before.
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
from transformers import FalconH1Config, FalconMambaConfig, JambaConfig, Mamba2Config, MambaConfig, Qwen3NextConfig
from transformers import AutoModelForCausalLM

base = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": None}
attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
mamba2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
experts = {"num_experts": 4, "num_experts_per_tok": 2}
configs = {
    "Mamba": MambaConfig(**base, state_size=8),
    "Falcon Mamba": FalconMambaConfig(**base, state_size=8),
    "Jamba": JambaConfig(
        **base, **attention, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, num_experts=2
    ),
    "Mamba-2": Mamba2Config(**base, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=8),
    "Falcon-H1": FalconH1Config(**base, **attention, **mamba2, mamba_d_ssm=128),
    "Qwen3-Next": Qwen3NextConfig(**base, **attention, **linear, **experts, head_dim=16, moe_intermediate_size=32),
}
text = torch.randint(2, 97, (1, 12), generator=torch.Generator().manual_seed(0))
new = torch.randint(2, 97, (1, 5), generator=torch.Generator().manual_seed(1))
print(f"transformers {transformers.__version__}: how far logits after the new tokens are off, in standard deviations")


@torch.no_grad()
def continued(model, step):
    """Logits after the new tokens, `step` of them at a time, from the cache of the text."""
    cache = model(text, use_cache=True).cache
    for first in range(0, new.shape[1], step):
        out = model(new[:, first : first + step], cache=cache, use_cache=True)
        cache = out.cache
    return out.logits[:, -1]


for name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
        expected = model(torch.cat([text, new], dim=1), use_cache=False).logits[:, -1]
    at_once, one_by_one = continued(model, 5), continued(model, 1)
    off = [float((logits - expected).abs().max() / expected.std()) for logits in (at_once, one_by_one)]
    print(f"{name:13} at once {off[0]:.4f}, one by one {off[1]:.4f}")
    assert off[1] < 1e-3, "one by one is wrong as well"
    assert (off[0] > 0.1) == (name in ("Mamba", "Falcon Mamba", "Jamba")), "the behaviour has changed"
    if name in ("Jamba", "Qwen3-Next"):
        options = {"attention_mask": torch.ones_like(text), "max_new_tokens": 8, "do_sample": False}
        whole = model.generate(text, **options)[0, 12:].tolist()
        chunks = model.generate(text, prefill_chunk_size=4, **options)[0, 12:].tolist()
        print(f"  generate:             {whole}\n  prefill_chunk_size=4: {chunks}")
        assert (whole == chunks) == (name == "Qwen3-Next"), "the behaviour has changed"
PY
