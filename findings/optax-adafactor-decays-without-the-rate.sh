#!/bin/sh
# Question: optax.adafactor(learning_rate=schedule, weight_decay_rate=0.1): how much does one step shrink a weight?
# Guess: by the learning rate times 0.1, as with optax.adamw(weight_decay=0.1). It ends where the schedule ends at 0.
# Seen (optax 0.2.8): by 0.1 itself, whatever the learning rate is. With the value that is usual for AdamW, ten steps leave
#   35% of a weight, at a learning rate of 0 too, so that the decay gets stronger relative to the updates as the schedule
#   falls. The documentation says "Optional rate at which to decay weights". In eight other optimizers of optax, the
#   decay is multiplied by the learning rate.
# Hurts: whoever replaces adamw by adafactor to save memory and keeps 0.1: the weights vanish. A value that looks harmless,
#   such as 1e-4, acts like AdamW's 0.1 at a rate of 1e-3, and goes on when the rate has fallen. Multiply it by the rate,
#   or chain optax.adafactor's parts with add_decayed_weights before the rate.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import jax.numpy as jnp
import optax

print("optax", optax.__version__)


def left(optimizer, steps=10, **settings):
    """The share of a weight that is left after steps without any gradient."""
    weights = {"w": jnp.ones((4, 8))}
    optimizer = optimizer(**settings)
    state = optimizer.init(weights)
    for _ in range(steps):
        updates, state = optimizer.update({"w": jnp.zeros((4, 8))}, state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights["w"][0, 0].item()


names = "adamaxw", "adamw", "adan", "lion", "nadamw"
others = {name: getattr(optax, name) for name in names}
others |= {name: getattr(optax.contrib, name) for name in ("acprop", "ademamix", "muon")}
for rate in (1e-2, 1e-3, 0.0):
    rest = [left(optimizer, learning_rate=rate, weight_decay=0.1) for optimizer in others.values()]
    adafactor = left(optax.adafactor, learning_rate=rate, weight_decay_rate=0.1)
    print(f"learning rate {rate}: adafactor leaves {adafactor:.1%}, eight others leave {min(rest):.2%} to {max(rest):.2%}")
    assert all(abs(share - (1 - 0.1 * rate) ** 10) < 1e-4 for share in rest)
    assert abs(adafactor - 0.9**10) < 1e-3, "the behaviour has changed"
schedule = optax.linear_schedule(1e-2, 0.0, 100)
shares = [left(optax.adafactor, steps, learning_rate=schedule, weight_decay_rate=1e-4) for steps in (100, 1000)]
print(f"weight_decay_rate 1e-4, rate 0 after 100 steps: {shares[0]:.2%} after 100 steps, {shares[1]:.2%} after 1,000")
assert abs(shares[0] - 0.99) < 1e-3 and abs(shares[1] - 0.905) < 1e-3, "the behaviour has changed"
PY
