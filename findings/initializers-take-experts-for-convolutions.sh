#!/bin/sh
# Question: the weights of 16 experts are one parameter of shape (16, 1024, 512), for a grouped product. It is initialised
#   by torch.nn.init.kaiming_uniform_ or xavier_normal_, or by the initializers of JAX or Keras of the same names. Which
#   standard deviation do the experts get?
# Guess: that of a single expert's matrix, (1024, 512). An initializer knows fan-in and fan-out, and each expert has 512
#   inputs and 1024 outputs, in one order or the other.
# Seen (torch 2.13.0, jax 0.10.2, keras 3.15.1): in none of the three. They take the parameter for a convolution's kernel.
#   To torch it has 16 output channels, 1024 input channels and a window of 512: Kaiming's weights are 32 times too small,
#   the root of 1024, and Xavier's are 19 times too small. To JAX and Keras the window is 16: all weights are 4 times too
#   small, the root of the number of experts. torch's orthogonal_ makes the 16 flattened experts orthogonal to each other;
#   no expert is orthogonal. JAX has batch_axis=0 for this; torch needs a loop over the experts. There is no message.
# Hurts: mixtures of experts with stacked weights. A gated expert multiplies three such matrices, so with Kaiming in torch
#   its output starts about 41,000 times too small. The residual stream hides it: the model trains, as if it had no
#   feedforward layers at first. Layers that are stacked for jax.lax.scan have such shapes too.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile \
    torch==2.13.0 numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 keras==3.15.1
fi
KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$PYTHON" - <<'PY'
import jax
import keras
import numpy as np
import torch

EXPERTS, ONE = 16, (1024, 512)
seen = {}


def report(name, make):
    """How many times smaller the numbers are in the stack of experts than in one expert's matrix."""
    seen[name] = float(np.std(np.asarray(make(ONE))) / np.std(np.asarray(make((EXPERTS, *ONE)))))
    print(f"{name}: an expert's weights are {seen[name]:.2f} times too small")


torch.manual_seed(0)
for name in ("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"):
    report(f"torch {name}", lambda shape, name=name: getattr(torch.nn.init, name)(torch.empty(shape)))
for name in ("lecun_normal", "he_uniform", "glorot_normal"):
    make = getattr(jax.nn.initializers, name)
    report(f"jax {name}", lambda shape, make=make: make()(jax.random.key(0), shape))
make = jax.nn.initializers.lecun_normal
print("jax with batch_axis=0:", end=" ")
right = np.std(make()(jax.random.key(0), ONE)) / np.std(make(batch_axis=0)(jax.random.key(0), (EXPERTS, *ONE)))
print(f"{right:.2f}")
for name in ("LecunNormal", "HeUniform", "GlorotNormal"):
    report(f"keras {name}", lambda shape, name=name: getattr(keras.initializers, name)(seed=0)(shape))
orthogonal = torch.nn.init.orthogonal_(torch.empty(EXPERTS, *ONE))
largest = torch.linalg.svdvals(orthogonal[0]).max().item()
print(f"torch orthogonal_: the largest singular value of the first expert is {largest:.3f}")


def gated(*shape):
    """The size of a gated expert's output, if its three matrices come from a tensor of this shape."""
    gate, up, down = (torch.nn.init.kaiming_uniform_(torch.empty(*shape)).reshape(-1, *ONE)[0] for _ in range(3))
    x = torch.randn(1000, ONE[1])
    return ((torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down).std().item()


ratio = gated(*ONE) / gated(EXPERTS, *ONE)
print(f"a gated expert's output is {ratio:,.0f} times too small")
assert ratio > 10_000, "the behaviour has changed"
assert abs(right - 1) < 0.05
for name, times in seen.items():
    expected = {"kaiming": 32, "xavier": 18.6}.get(name.split()[1].split("_")[0], 4)
    assert abs(times / expected - 1) < 0.05, "the behaviour has changed"
assert largest < 0.2, "the behaviour has changed"
PY
