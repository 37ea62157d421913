#!/bin/sh
# Question: an x-transformers decoder was trained with shift_tokens=1 (a part of each layer's features comes from the token
#   before) or with attn_data_dependent_alibi. AutoregressiveWrapper.generate uses a cache of keys and values by default
#   (cache_kv=True). Is the text the same as without it?
# Guess: yes. The network has a flag for this, can_cache_kv; where an option cannot be cached (selective attention, memory
#   tokens), generation goes on without the cache.
# Seen (x-transformers 2.31.10, torch 2.13.0, CPU, fp32): not for these two. With the cache, a new token sees neither the
#   features of the token before it nor the distances of the data-dependent ALiBi, so that the network is not the one that
#   was trained: in small random models, the logits are off by 0.8 of their spread (shifted tokens) and by 0.1 (ALiBi), and
#   greedy texts differ. With usual ALiBi, rotary embeddings and grouped keys, they agree. Nothing warns.
# Hurts: samples and benchmarks by generation of such models, which look like poor training: the validation loss is right.
#   Pass cache_kv=False.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 x-transformers==2.31.10 numpy==2.4.6
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

VOCABULARY, PROMPT, TOKENS = 32, 6, 24
tokens = torch.randint(1, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(1))
cases = {  # the options, whether the cache gives the same text
    "plain": ({}, True),
    "ALiBi": (dict(alibi_pos_bias=True), True),
    "rotary, grouped keys": (dict(rotary_pos_emb=True, attn_kv_heads=2), True),
    "selective attention": (dict(attn_selective=True), True),
    "shifted tokens": (dict(shift_tokens=1), False),
    "shifted tokens, rotary": (dict(shift_tokens=1, rotary_pos_emb=True), False),
    "data-dependent ALiBi": (dict(attn_data_dependent_alibi=True), False),
}
for name, (options, right) in cases.items():
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=3, heads=4, attn_dim_head=8, **options)
    network = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(0, 0.3) if weight.dim() > 1 else None
        model = AutoregressiveWrapper(network)
        without = model.generate(tokens, TOKENS, temperature=0.0, cache_kv=False)
        cached = model.generate(tokens, TOKENS, temperature=0.0)
        text = torch.cat([tokens, without], 1)
        wanted = network(text)[:, -1]  # the logits after the last token
        _, cache = network(text[:, :-1], return_intermediates=True)
        seen = network(text, cache=cache)[:, -1] if network.can_cache_kv else wanted
    error = float((seen - wanted).std() / wanted.std())
    print(f"{name}: the network says that it can be cached: {network.can_cache_kv}; equal tokens with and without: "
          f"{float((cached == without).float().mean()):.0%}; error of the logits {error:.2f} of their spread")
    if right:
        assert torch.equal(cached, without) and error < 1e-3
    else:
        assert not torch.equal(cached, without) and error > 0.1, "the behaviour has changed"
PY
