#!/bin/sh
# Question: a data-parallel step of JAX computes the gradient of its part of the batch, and then the mean over the devices:
#   jax.lax.pmean(jax.grad(loss)(weights, batch), "data"). It moves from jax.pmap to jax.shard_map, with the weights on all
#   devices, P(), and the batch split, P("data"). Is the gradient the same?
# Guess: yes, the mean over the devices, and thus the gradient of the mean loss.
# Seen (jax 0.10.2, four CPU devices): four times as large, without a message. In shard_map, jax.grad itself already sums
#   the gradient of a value that is the same on all devices, since that value was copied to them; pmean of the sum, which is
#   the same on all devices, changes nothing. The loss, by pmean, is right. With check_vma=False the gradient is the mean,
#   as under pmap, and jax.experimental.shard_map does as the new one. Right with the default: the gradient of the pmean
#   of the loss, or weights that jax.lax.pcast(…, to="varying") has marked before jax.grad.
# Hurts: whoever moves a training step off pmap, as JAX advises: gradients grow with the number of devices. SGD has N times
#   the learning rate; with Adam nothing is seen but gradient norms, and clipping by norm then cuts every step.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile jax==0.10.2 numpy==2.4.6
fi
XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu "$PYTHON" - <<'PY'
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

weights, batch = jnp.array([2.0]), jnp.arange(8.0)[:, None]
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def loss(weights, batch):
    return ((batch @ weights) ** 2).mean()


def step(weights, batch):
    """The mean over the devices of the loss and of its gradient."""
    return jax.lax.pmean(jax.value_and_grad(loss)(weights, batch), "data")


def step_with_varying_weights(weights, batch):
    return step(jax.lax.pcast(weights, "data", to="varying"), batch)


def step_with_mean_of_loss(weights, batch):
    return jax.value_and_grad(lambda weights: jax.lax.pmean(loss(weights, batch), "data"))(weights)


def shard_map(step, **options):
    specs = (PartitionSpec(), PartitionSpec("data"))
    value, gradient = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), **options)(weights, batch)
    return value.item(), gradient.item()


value, gradient = jax.pmap(step, axis_name="data", in_axes=(None, 0))(weights, batch.reshape(4, 2, 1))
seen = {
    "one device": (loss(weights, batch).item(), jax.grad(loss)(weights, batch).item()),
    "pmap": (value[0].item(), gradient[0].item()),
    "shard_map": shard_map(step),
    "shard_map, jitted": shard_map(jax.jit(step)),
    "shard_map, check_vma=False": shard_map(step, check_vma=False),
    "shard_map, gradient of the pmean of the loss": shard_map(step_with_mean_of_loss),
    "shard_map, weights marked as varying": shard_map(step_with_varying_weights),
}
for name, (value, gradient) in seen.items():
    print(f"{name}: loss {value}, gradient {gradient}")
wrong = {name for name, pair in seen.items() if pair != seen["one device"]}
assert wrong == {"shard_map", "shard_map, jitted"}, "the behaviour has changed"
assert seen["shard_map"] == (seen["one device"][0], 4 * seen["one device"][1]), "the behaviour has changed"
PY
