#!/bin/sh
# Question: a text is in the cache, its last three tokens are taken back (an edited turn, a rejected draft), cache.crop(-3),
#   and others are appended. The cache is a StaticCache, the model has sliding windows (Mistral, Gemma 3, gpt-oss). Are the
#   logits those of the edited text?
# Guess: yes, or it is refused. The same call on a DynamicCache is: "the current layer does not track past states, and the
#   sliding window has been exceeded".
# Seen (transformers 5.24.0, torch 2.13.0, CPU, fp32, small random models): once the text is longer than the window, they
#   are off by 0.2 to 0.9 of their spread, and nothing is raised. The window's buffer has been shifted for the tokens that
#   are taken back, and is not shifted back: the tokens that should come into the window again are lost, and later ones are
#   in a wrong place. Without windows, or with a text within the window, crop is right.
# Hurts: servers and agents that edit a compiled model's cache, and own speculative decoding: the text goes on fluently,
#   from a context that is not the one shown.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    StaticCache,
)

WINDOW, TAKEN = 16, 3
shape = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
heads = shape | dict(head_dim=16, sliding_window=WINDOW)
models = {
    "Llama": LlamaConfig(**shape),
    "Mistral": MistralConfig(**shape, sliding_window=WINDOW),
    "Gemma 3": Gemma3TextConfig(**heads, query_pre_attn_scalar=16),
    "gpt-oss": GptOssConfig(**heads, num_local_experts=4, num_experts_per_tok=2),
}
generator = torch.Generator().manual_seed(0)
for name, config in models.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.25) if weight.dim() > 1 else None
    for length in (WINDOW - 4, 2 * WINDOW):
        text, new = (torch.randint(3, 64, (1, size), generator=generator) for size in (length, 5))
        for kind in (DynamicCache, StaticCache):
            cache = kind(config=config) if kind is DynamicCache else kind(config=config, max_cache_len=64)
            with torch.no_grad():
                wanted = model(torch.cat([text[:, :-TAKEN], new], 1), use_cache=False).logits[:, -5:]
                model(text, past_key_values=cache)
                try:
                    cache.crop(-TAKEN)
                except RuntimeError as error:
                    print(f"{name}, {length} tokens, {kind.__name__}: refused: {str(error)[:60]}…")
                    assert kind is DynamicCache and length > WINDOW and name != "Llama"
                    continue
                seen = model(new, past_key_values=cache).logits
            error = float((seen - wanted).abs().mean() / wanted.std())
            print(f"{name}, {length} tokens, {kind.__name__}: error {error:.2f} of the logits' spread (window: {WINDOW})")
            if name == "Llama" or length < WINDOW:
                assert error < 1e-3
            elif kind is StaticCache:
                assert error > 0.1, "the behaviour has changed"
PY
