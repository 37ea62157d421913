#!/bin/sh
# Question: a Llama is exported with ExecuTorch's use_attention_sink ("sink,window"), to chat without end in a cache of
#   fixed size: the first tokens stay, and of the others, the last ones. Are the distances between tokens always right?
# Guess: yes. In the paper (arXiv 2309.17453), positions are those in the cache, so keys are rotated when they are used.
# Seen (executorch 1.5.1, torch 2.13.0, CPU, fp32, a small random model): until token sink + 2 × window. There, positions
#   begin again after the sink, but the keys in the cache keep the rotation of their old positions: the last tokens seem to
#   lie in the future, up to two windows ahead. The logits are off by 0.7 of their spread at once, and with two layers,
#   it takes two windows until all is right again, and then it begins anew. (With a sink of 0, the right answer is that of
#   an ordinary sliding window. With a sink of 4, the error begins at the same place.) A comment in the source says that
#   distances hold "only within a wrap"; the export says nothing.
# Hurts: long chats on devices: every 2 × window tokens, the model misreads all that it has in its window.
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
from executorch.examples.models.llama.source_transformation.attention_sink import enable_attention_sink
from torch.nn import functional as F

WINDOW, TOKENS, LAYERS = 16, 112, 2
attention = F.scaled_dot_product_attention
tokens = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def settings(length, cached):
    return ModelArgs(dim=64, n_layers=LAYERS, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=64, max_seq_len=length,
                     max_context_len=length, use_kv_cache=cached, enable_dynamic_shape=cached, rope_theta=10000.0,
                     generate_full_logits=True)  # fmt: skip


for sink in (0, 4):
    torch.manual_seed(0)
    reference = construct_transformer(settings(TOKENS, False)).eval()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.normal_(0, 0.15) if weight.dim() > 1 else None
    arguments = settings(sink + 2 * WINDOW, True)
    cached = construct_transformer(arguments).eval()
    cached.load_state_dict(reference.state_dict(), strict=False)
    cached = enable_attention_sink(cached, arguments, sink, WINDOW)

    def windowed(query, key, value, attn_mask=None, **options):
        row, column = torch.arange(query.shape[-2])[:, None], torch.arange(query.shape[-2])
        mask = (row >= column) & ((row - column < WINDOW) | (column < sink))
        return attention(query, key, value, attn_mask=mask)

    with torch.no_grad():
        F.scaled_dot_product_attention = windowed
        wanted = reference(tokens)[0]
        F.scaled_dot_product_attention = attention
        seen = [cached(tokens[:, step : step + 1], {"input_pos": torch.tensor([step])})[0] for step in range(TOKENS)]
    wanted, seen = wanted.view(TOKENS, -1), torch.cat(seen).view(TOKENS, -1)
    errors = (seen - wanted).abs().mean(-1) / wanted.std()
    wrap = sink + 2 * WINDOW
    print(f"sink {sink}, window {WINDOW}: error of the logits, mean of 8 tokens, as part of their spread:",
          [f"token {start}: {errors[start : start + 8].mean():.2f}" for start in range(sink, TOKENS - 7, 8)])
    assert errors[:wrap].max() < 1e-3 and errors[wrap : wrap + WINDOW // 2].min() > 0.1, "the behaviour has changed"
    if sink == 0:  # between the wraps, all is right again
        assert errors[wrap + LAYERS * WINDOW - 1 : 2 * wrap].max() < 1e-3
PY
