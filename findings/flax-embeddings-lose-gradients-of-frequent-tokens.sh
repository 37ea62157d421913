#!/bin/sh
# Question: a Flax model trains in mixed precision, dtype=jnp.bfloat16 with fp32 parameters. Is the gradient of nn.Embed's
#   fp32 table right for a token that occurs 16,777 times among 65,536?
# Guess: yes, to 1%. Parameters and gradients are fp32, and the gradients of Dense and LayerNorm are right.
# Seen (flax 0.12.8, jax 0.10.2, CPU): no. Embed converts the table to bf16 before it looks tokens up, so the gradients of
#   a token's occurrences are added in bf16, and only their sum is converted to fp32. The sum stops at 256 times one
#   gradient: 256 for 65,536 ones. With gradients of mean 0.1 and noise of 0.5, the most frequent token of a Zipf
#   distribution has a third of its gradient, and one that occurs 300 times has all of it. nnx.Embed does the same,
#   jax.ops.segment_sum and .at[].add of bf16 too. An Embed with dtype=jnp.float32 whose output is converted is right.
# Hurts: pretraining with large batches: frequent tokens learn too slowly, the more so the larger the batch, and the
#   clipped norm of the gradient is too small.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 numpy==2.4.6
fi
JAX_PLATFORMS=cpu "$PYTHON" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

tokens, size = 65_536, 8


def gradient(dtype, ids, coefficients):
    """Gradient of the fp32 table for a loss that weighs outputs, converted to bf16, by the coefficients."""
    embed = linen.Embed(1000, size, dtype=dtype, param_dtype=jnp.float32)
    variables = embed.init(jax.random.key(0), ids)

    def loss(variables):
        output = embed.apply(variables, ids).astype(jnp.bfloat16)
        return (output.astype(jnp.float32) * coefficients).sum()

    table = jax.grad(loss)(variables)["params"]["embedding"]
    assert table.dtype == variables["params"]["embedding"].dtype == jnp.float32
    return np.asarray(table)


one_token, ones = jnp.zeros(tokens, int), jnp.ones((tokens, size))
lost, right = (gradient(dtype, one_token, ones)[0, 0] for dtype in (jnp.bfloat16, jnp.float32))
print(f"one token {tokens} times, gradients of 1: dtype=bfloat16 {lost:.0f}, dtype=float32 {right:.0f}")
embed = nnx.Embed(4, size, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
gradients = nnx.grad(lambda embed: embed(one_token).astype(jnp.float32).sum())(embed)
print(f"nnx.Embed: {jax.tree.leaves(gradients)[0][0, 0]:.0f}")
dense = linen.Dense(size, dtype=jnp.bfloat16)
variables = dense.init(jax.random.key(0), ones)
bias = jax.grad(lambda v: dense.apply(v, ones).astype(jnp.float32).sum())(variables)["params"]["bias"][0]
print(f"bias of Dense: {bias:.0f}")

ids = np.minimum(np.random.default_rng(0).zipf(1.3, tokens) - 1, 999)
noisy = 0.1 + 0.5 * jax.random.normal(jax.random.key(2), (tokens, size))
low, high = (gradient(dtype, jnp.asarray(ids), noisy).mean(axis=1) for dtype in (jnp.bfloat16, jnp.float32))
for token in (0, 1, 2, 5, 20):
    print(f"token that occurs {(ids == token).sum()} times: {low[token]:.1f}, in fp32 {high[token]:.1f}")
assert right == tokens and bias == tokens and abs(low[20] / high[20] - 1) < 0.05
assert lost == 256 and low[0] < 0.5 * high[0], "the behaviour has changed"
PY
