#!/bin/sh
# Question: jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10) rounds fp32 numbers to those that fp16 can
#   hold, to simulate training or inference in another format. Does it do what a cast to fp16 and back does?
# Guess: yes, exactly, for fp16, bf16 and the fp8 formats with infinities.
# Seen (jax 0.10.2, CPU): only for normal numbers. What is subnormal in the format becomes 0: in fp16 all below 6.1e-5,
#   where the smallest number is 6.0e-8, in e5m2 likewise below 6.1e-5 and in IEEE's e4m3 below 0.0156, which a cast
#   keeps, as hardware does. The function's page says only that it wraps an operator of XLA. Under jit it is the same.
# Hurts: studies of precision: gradients of 1e-5 vanish in the simulation that fp16 and e5m2 keep, so a format looks worse
#   than it is, and loss scaling more necessary. x.astype(dtype) and back is right.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile jax==0.10.2 jaxlib==0.10.2 ml_dtypes==0.6.0 numpy==2.4.6
fi
JAX_PLATFORMS=cpu "$PYTHON" - <<'PY'
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

generator = np.random.default_rng(0)
formats = [  # name, dtype, bits of the exponent and of the mantissa
    ("fp16", jnp.float16, 5, 10),
    ("bf16", jnp.bfloat16, 8, 7),
    ("e5m2", jnp.float8_e5m2, 5, 2),
    ("e4m3 (IEEE)", jnp.float8_e4m3, 4, 3),
]
for name, dtype, exponent, mantissa in formats:
    info = ml_dtypes.finfo(dtype)
    normal, least, largest = (float(number) for number in (info.smallest_normal, info.smallest_subnormal, info.max))
    numbers = np.exp(generator.uniform(np.log(max(least, 1e-37)), np.log(largest), 100_000)).astype(np.float32)
    cast = np.asarray(numbers.astype(dtype), np.float32)
    reduced = np.asarray(jax.lax.reduce_precision(numbers, exponent, mantissa))
    compiled = np.asarray(jax.jit(lambda x: jax.lax.reduce_precision(x, exponent, mantissa))(numbers))
    small = (numbers < normal) & (cast > 0)
    different = reduced != cast
    lost = f"{numbers[different].min():.1e} to {numbers[different].max():.1e}, all to 0" if different.any() else "none"
    print(f"{name}: differ from a cast: {lost}; smallest normal {normal:.1e}, smallest {least:.1e}")
    assert np.array_equal(reduced, compiled)
    assert np.array_equal(reduced[numbers >= normal], cast[numbers >= normal])
    if name != "bf16":  # its subnormal numbers are those of fp32
        assert (reduced[small & (cast < normal)] == 0).all() and small.mean() > 0.05, "the behaviour has changed"

gradients = (1e-5 * generator.standard_normal(100_000)).astype(np.float32)
variants = gradients.astype(np.float16), gradients.astype(jnp.float8_e5m2), jax.lax.reduce_precision(gradients, 5, 10)
kept = [np.mean(np.asarray(each, np.float32) != 0) for each in variants]
print(f"gradients of 1e-5 that are left: {kept[0]:.1%} in fp16, {kept[1]:.1%} in e5m2, {kept[2]:.1%} by reduce_precision")
assert kept[0] > 0.9 and kept[1] > 0.3 and kept[2] < 0.01, "the behaviour has changed"
PY
