#!/bin/sh
# Question: targets that do not count are -100, as transformers' collators and torch have it. What do the cross-entropies of
#   optax, MLX and Keras make of them?
# Guess: they are ignored, or the loss is NaN or an error, since -100 is no token.
# Seen (optax 0.2.8, mlx 0.32.4, keras 3.15.1): optax and MLX count from the end, as Python does: -100 is token 50,157 of
#   50,257, and the model is trained to predict it. The loss is that of a random token, so nothing looks wrong, and it falls
#   while training, soon below the right one. Only labels of 50,257 and more give NaN (optax). Keras gives such targets a
#   loss of 0, but divides by all, so with half of them the loss and the gradient are half as large; with ignore_class=-100
#   it is right.
# Hurts: training in JAX, MLX or Keras with a data pipeline that was made for transformers: padding and prompts become the
#   most frequent target. Multiply the losses by (labels >= 0), and divide by the number of such labels.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile optax==0.2.8 jax==0.10.2 'mlx[cpu]==0.32.4' keras==3.15.1 numpy==2.4.6
fi
KERAS_BACKEND=jax "$PYTHON" - <<'PY'
import jax
import jax.numpy as jnp
import keras
import mlx.core as mx
import mlx.nn
import numpy as np
import optax

vocabulary, tokens = 50257, 8
logits = np.random.default_rng(0).standard_normal((tokens, vocabulary)).astype(np.float32)
labels = np.arange(tokens)
labels[::2] = -100
losses = -np.asarray(jax.nn.log_softmax(logits))[np.arange(tokens), labels % vocabulary]
right = losses[1::2].mean()
print(f"loss of the labels that count: {right:.4f}; with -100 as token {-100 % vocabulary:,}: {losses.mean():.4f}")


def keras_loss(**options):
    return float(keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)(labels, logits))


seen = {
    "optax": float(optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()),
    "mlx": mlx.nn.losses.cross_entropy(mx.array(logits), mx.array(labels), reduction="mean").item(),
    "keras": keras_loss(),
    "keras, ignore_class=-100": keras_loss(ignore_class=-100),
}
print("losses:", {name: round(loss, 4) for name, loss in seen.items()})
too_large = optax.losses.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits[:1]), jnp.array([vocabulary]))
assert np.isnan(too_large[0])
assert np.isclose(seen["keras, ignore_class=-100"], right) and np.isclose(seen["keras"], right / 2), "Keras has changed"
assert np.isclose(seen["optax"], losses.mean()) and np.isclose(seen["mlx"], losses.mean()), "the behaviour has changed"
weights = jax.nn.one_hot(jnp.zeros(1, int), vocabulary)  # logits of one row, trained on -100 alone
step = jax.jit(jax.grad(lambda x: optax.losses.softmax_cross_entropy_with_integer_labels(x, jnp.array([-100])).mean()))
for _ in range(100):
    weights -= 10 * step(weights)
print("trained on -100 alone, the model predicts token", int(weights.argmax()))
assert int(weights.argmax()) == vocabulary - 100
PY
