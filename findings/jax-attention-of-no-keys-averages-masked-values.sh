#!/bin/sh
# Question: a row of attention has no key: its mask is False everywhere, or its sequence of keys has the length 0 (an empty
#   memory, a retrieval without results). What does jax.nn.dot_product_attention return for it?
# Guess: zeros, as torch's scaled_dot_product_attention does, or NaN.
# Seen (jax 0.10.2, on a CPU): the mean of all values, those that are masked out too. Masked logits become one large
#   negative number, so the softmax of a row that has only these is uniform. The gradient flows into masked values.
#   key_value_seq_lengths=0 does the same; rows past query_seq_lengths are zeros. Rows with one key or more are right.
# Hurts: cross-attention with empty memories, sparse and window masks, packed rows: such rows read what they must not,
#   padding or other documents, the result looks plausible, and it changes with the amount of padding.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$dir/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp

query = jnp.ones((1, 3, 1, 8))
key, value = jax.random.normal(jax.random.key(0), (2, 1, 4, 1, 8))
mask = jnp.array([[[[True, True, False, False], [False] * 4, [True, False, False, False]]]])


def attend(value, padding=0, **options):
    wider = [(0, 0), (0, padding), (0, 0), (0, 0)]
    return jax.nn.dot_product_attention(query, jnp.pad(key, wider), jnp.pad(value, wider), **options)[0, :, 0]


masked = attend(value, mask=mask)
padded = attend(value, padding=4, mask=jnp.pad(mask, [(0, 0)] * 3 + [(0, 4)]))
empty = attend(value, key_value_seq_lengths=jnp.array([0]))
past = attend(value, query_seq_lengths=jnp.array([2]))[2]
mean = value[0, :, 0].mean(0)
gradient = jax.grad(lambda value: attend(value, mask=mask)[1].sum())(value)[0, :, 0, 0]
print("row with two keys:", masked[0, :3], "with one key:", masked[2, :3], "that key's value:", value[0, 0, 0, :3])
print("row without keys:", masked[1, :3], "mean of all masked values:", mean[:3])
print("the same with four more masked keys:", padded[1, :3])
print("keys of length 0:", empty[0, :3], "gradient of the masked values:", gradient)
assert not past.any()
assert jnp.allclose(masked[2], value[0, 0, 0], atol=1e-6) and jnp.allclose(masked[0], padded[0], atol=1e-6)
assert jnp.allclose(masked[1], mean, atol=1e-6) and jnp.allclose(empty[0], mean, atol=1e-6), "the behaviour has changed"
assert jnp.allclose(padded[1], mean / 2, atol=1e-6) and jnp.allclose(gradient, 0.25), "the behaviour has changed"
PY
