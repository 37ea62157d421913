#!/bin/sh
# Question: optax.inject_hyperparams(optax.adamw)(learning_rate=…) makes the learning rate readable and adjustable. The
#   parameters are bf16. Are the updates those of optax.adamw?
# Guess: yes. The wrapper only moves the settings into the state.
# Seen (optax 0.2.8, jax 0.10.2): all updates are NaN. The wrapper rounds every setting, not only the learning rate, to
#   the dtype of the parameters. In bf16, b2 = 0.999 is 1, so the squares of gradients stay 0 and their bias correction
#   divides by 0. b2 = 0.99 becomes 0.988, a learning rate of 3e-4 is 0.2% off, and a schedule has steps of 0.4%. With
#   hyperparam_dtype=jnp.float32, updates are right. The page on inject_hyperparams does not say what the default is.
# Hurts: training in bf16 with optax: the usual way to log a learning rate stops the run, or changes it a little.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile optax==0.2.8 jax==0.10.2 jaxlib==0.10.2
fi
JAX_PLATFORMS=cpu "$PYTHON" - <<'PY'
import jax.numpy as jnp
import numpy as np
import optax


def updates(optimizer, dtype):
    parameters = {"w": jnp.ones((4,), dtype)}
    state = optimizer.init(parameters)
    seen = []
    for step in range(5):
        update, state = optimizer.update({"w": jnp.full((4,), 0.1 * (step + 1), dtype)}, state, parameters)
        seen.append(float(update["w"][0]))
    settings = getattr(state, "hyperparams", {})
    shown = ", ".join(f"{name} {float(settings[name]):.7g}" for name in settings if name in ("learning_rate", "b2"))
    print(dtype.__name__, shown or "not injected", *(f"{value:.3g}" for value in seen))
    return np.array(seen)


inject = optax.inject_hyperparams
for dtype in (jnp.float32, jnp.bfloat16):
    plain = updates(optax.adamw(3e-4), dtype)
    injected = updates(inject(optax.adamw)(3e-4), dtype)
    if dtype == jnp.float32:
        assert np.allclose(plain, injected, rtol=0.01)
    else:
        assert np.isnan(injected).all(), "the behaviour has changed"
        fp32_settings = updates(inject(optax.adamw, hyperparam_dtype=jnp.float32)(3e-4), dtype)
        assert np.allclose(plain, fp32_settings, rtol=0.01)
PY
