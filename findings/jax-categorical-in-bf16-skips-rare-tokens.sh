#!/bin/sh
# Question: tokens are sampled with jax.random.categorical(key, logits) from bf16 logits over GPT-2's vocabulary of
#   50,304. How often are tokens drawn whose probability is under 1 in 10,000?
# Guess: as often as their probabilities sum to, 43% below. The sampler's noise is fp32, whatever the logits are.
# Seen (jax 0.10.2, CPU): never. The Gumbel noise has the dtype of the logits and is at most 4.84 in bf16, so tokens
#   that are far from the most likely one cannot win. 4,000 samples hit 253 different tokens, and 2,636 with the same
#   logits in fp32. If all logits are equal, four in five samples are among the first 200 tokens, since the first wins
#   ties. With mode="high", 86% of the samples are such rare tokens. The documentation gives a limit for fp32: 1e-7.
# Hurts: sampling from models that compute in bf16, routers with noise, and reinforcement learning, which needs the
#   probabilities: text becomes narrower than its temperature says. Convert logits to fp32 first.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile 'jax[cpu]==0.10.2'
fi
JAX_PLATFORMS=cpu "$PYTHON" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np


def samples(logits, **options):
    keys = jax.random.split(jax.random.key(0), 8)
    return np.concatenate([jax.random.categorical(key, logits, shape=(500,), **options) for key in keys])


logits = (2 * jax.random.normal(jax.random.key(9), (50_304,))).astype(jnp.bfloat16)
probabilities = np.asarray(jax.nn.softmax(logits.astype(jnp.float32)))
rare = probabilities < 1e-4
print(f"tokens under 1e-4 have {probabilities[rare].sum():.0%} of the probability")
cases = {
    "fp32": samples(logits.astype(jnp.float32)),
    "bf16": samples(logits),
    'bf16, mode="high"': samples(logits, mode="high"),
}
seen = {}
for name, tokens in cases.items():
    seen[name] = rare[tokens].mean()
    print(f"{name}: {seen[name]:.0%} of the samples are such tokens, {len(set(tokens.tolist())):,} different tokens")
first = (samples(jnp.zeros(50_304, jnp.bfloat16)) < 200).mean()
print(f"equal logits in bf16: {first:.0%} of the samples are among the first 200 tokens")
assert abs(seen["fp32"] - probabilities[rare].sum()) < 0.03
assert seen["bf16"] < 0.01 and first > 0.5, "the behaviour has changed"
PY
