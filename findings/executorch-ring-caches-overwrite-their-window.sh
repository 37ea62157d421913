#!/bin/sh
# Question: a model with sliding windows is exported with ExecuTorch's local_global_attention, whose layers keep a ring of
#   2 × window tokens. A second message of more tokens than the window is read in one piece. Are the logits right?
# Guess: yes, or it is refused, as pieces above 2 × window are: "Update sequence length … must be smaller than the cache
#   size".
# Seen (executorch 1.5.1, torch 2.13.0, CPU, fp32, a small random model): the whole piece is written into the ring before
#   its tokens attend. From window + 2 tokens on, it overwrites keys that its own first tokens need: up to window - 1 tokens
#   back. Their logits are off by up to their spread, and the layers above store keys of it. The first message is right,
#   since nothing lies before it, and pieces up to window + 1 tokens are. Nothing is raised up to 2 × window.
# Hurts: chats on devices: the answer to a second or third long message is made from a damaged context; with one message,
#   or token by token, all tests pass. Read messages in pieces of at most the window.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 executorch==1.5.1 numpy==2.4.6
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
from executorch.examples.models.llama.llama_transformer import construct_transformer
from executorch.examples.models.llama.model_args import ModelArgs
from executorch.examples.models.llama.source_transformation.custom_kv_cache import replace_kv_cache_with_ring_kv_cache
from torch.nn import functional as F

WINDOW, TOKENS = 16, 60
attention = F.scaled_dot_product_attention
tokens = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def made(cached):
    torch.manual_seed(0)
    model = construct_transformer(ModelArgs(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=64, max_seq_len=TOKENS, rope_theta=10000.0,
        max_context_len=TOKENS, use_kv_cache=cached, enable_dynamic_shape=cached, generate_full_logits=True)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.15) if weight.dim() > 1 else None
    return model


def windowed(query, key, value, attn_mask=None, **options):
    row, column = torch.arange(query.shape[-2])[:, None], torch.arange(query.shape[-2])
    return attention(query, key, value, attn_mask=(row >= column) & (row - column < WINDOW))


with torch.no_grad():
    F.scaled_dot_product_attention = windowed
    wanted = made(cached=False)(tokens)[0].view(TOKENS, -1)
    F.scaled_dot_product_attention = attention
    for pieces in ([1] * 60, [30, 17, 13], [30, 18, 12], [30, 24, 6], [28, 32]):
        model, seen, start = replace_kv_cache_with_ring_kv_cache(made(cached=True), [WINDOW]), [], 0
        for size in pieces:
            logits = model(tokens[:, start : start + size], {"input_pos": torch.tensor([start])})[0]
            seen.append(logits.view(size, -1))
            start += size
        errors = (torch.cat(seen) - wanted).abs().mean(-1) / wanted.std()
        wrong = (errors > 1e-3).nonzero().flatten().tolist()
        name = pieces if len(pieces) < 9 else "of one token"
        print(f"window {WINDOW}, pieces {name}: {len(wrong)} of {TOKENS} tokens wrong"
              + (f", from token {wrong[0]}, by up to {errors.max():.2f} of the logits' spread" if wrong else ""))
        assert not wrong[:1] or wrong[0] >= pieces[0]
        assert bool(wrong) == (max(pieces[1:]) > WINDOW + 1), "the behaviour has changed"
PY
