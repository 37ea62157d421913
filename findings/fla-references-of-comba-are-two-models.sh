#!/bin/sh
# Question: flash-linear-attention has two "reference PyTorch implementations" of Comba, naive_recurrent_comba, token by
#   token, and naive_chunk_comba, in chunks. Kernels, exports and ports are checked against them. Do they give the same
#   outputs and the same last state?
# Guess: yes, up to rounding, as those of GLA, Gated DeltaNet, KDA and GDN-2 do.
# Seen (flash-linear-attention 0.6.0, torch 2.13.0, fp32): no. The recurrent one lets the state decay first and then takes
#   from each value what the state predicts for it, as Gated DeltaNet does. The one in chunks subtracts first, and then
#   lets the state decay. So do both Triton kernels, by their source, which was not run. If a token keeps 90% of the
#   state, outputs differ by 2.6%; if it keeps 50%, by 7.6%. They agree only where nothing decays.
# Hurts: those who port Comba or write a kernel: the short loop is what one reads and copies, and a trained checkpoint then
#   runs as another model, near enough to pass for rounding in bf16. Compare with naive_chunk_comba.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 triton==3.9.0 numpy==2.4.6 \
    flash-linear-attention==0.6.0 transformers==5.24.0
fi
TRITON_INTERPRET=1 "$PYTHON" -W ignore - <<'PY'
from importlib.metadata import version

import torch
from fla.ops.comba.naive import naive_chunk_comba, naive_recurrent_comba
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from torch.nn.functional import normalize

generator = torch.Generator().manual_seed(0)
B, T, H, K = 2, 128, 2, 16
q, k = (normalize(torch.randn(B, T, H, K, generator=generator), dim=-1) for _ in "qk")
v = torch.randn(B, T, H, K, generator=generator)
p, beta = 0.8 * k, torch.rand(B, T, H, generator=generator)


def by_hand(log_decay, decay_first):
    """Comba token by token; its outputs, [B, T, H, K], and its last state, [B, H, K, K]."""
    state, outputs = torch.zeros(B, H, K, K), []
    for t in range(T):
        decayed = state * log_decay[:, t, :, None, None].exp()
        read = decayed if decay_first else state
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", p[:, t], read))
        state = decayed + k[:, t, :, :, None] * new[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * K**-0.5, state))
    return torch.stack(outputs, 1), state


def off(seen, expected):
    """The larger of the errors of the outputs and of the state, relative to their norms."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(seen, expected, strict=True))


print("flash-linear-attention", version("flash-linear-attention"), "torch", torch.__version__)
for kept in (1.0, 0.99, 0.9, 0.5):
    log_decay = torch.full((B, T, H), kept).log()
    recurrent = naive_recurrent_comba(q, k, v, p, beta=beta, g=log_decay, output_final_state=True)
    chunks = naive_chunk_comba(q, k, v, p, g=log_decay, beta=beta, output_final_state=True)
    delta = naive_recurrent_gated_delta_rule(q, k, v, beta=beta, g=log_decay, output_final_state=True)
    delta_chunks = naive_chunk_gated_delta_rule(q, k, v, g=log_decay, beta=beta, output_final_state=True)
    outputs = off(recurrent[:1], chunks[:1])
    print(f"kept {kept:.0%}: outputs differ by {outputs:.2%}, those of Gated DeltaNet by {off(delta, delta_chunks):.1e}")
    assert off(delta, delta_chunks) < 1e-5
    assert off(recurrent, by_hand(log_decay, decay_first=True)) < 1e-5, "the behaviour has changed"
    assert off(chunks, by_hand(log_decay, decay_first=False)) < 1e-5
    assert outputs > 0.1 * (1 - kept) or kept == 1, "the behaviour has changed"
PY
