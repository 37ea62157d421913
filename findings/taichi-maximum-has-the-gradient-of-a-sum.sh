#!/bin/sh
# Question: a Taichi kernel takes the maximum of a field by ti.atomic_max into the loss, and ti.ad.Tape differentiates it.
#   What is the gradient?
# Guess: 1 for the largest value and 0 for the others, as of torch.max, or an error: atomics are hard to differentiate.
# Seen (taichi 1.7.4, CPU): 1 for every value, as of a sum, without a message. atomic_min is alike. The maximum itself is
#   right. A loop with `if x[j] > m: m = x[j]` in one thread has the right gradient.
# Hurts: maxima, margins and penalties of the worst case in differentiable simulations and losses: all values are pushed
#   down together, and a training that follows them still makes some progress.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile taichi==1.7.4 numpy==2.4.6
cat > "$dir/check.py" <<'PY'
import numpy as np
import taichi as ti

ti.init(arch=ti.cpu, log_level=ti.ERROR)
values = np.array([0.5, -1, 2, 0], np.float32)
x = ti.field(ti.f32, shape=4, needs_grad=True)
loss = ti.field(ti.f32, shape=(), needs_grad=True)


@ti.kernel
def by_atomic_max():
    for i in x:
        ti.atomic_max(loss[None], x[i])


@ti.kernel
def by_atomic_min():
    for i in x:
        ti.atomic_min(loss[None], x[i])


@ti.kernel
def by_loop():
    for _ in range(1):
        largest = x[0]
        for j in range(1, 4):
            if x[j] > largest:
                largest = x[j]
        loss[None] += largest


def gradient(kernel):
    x.from_numpy(values)
    loss[None] = 0
    with ti.ad.Tape(loss):
        kernel()
    return loss[None], x.grad.to_numpy().tolist()


for kernel in (by_atomic_max, by_atomic_min, by_loop):
    result, found = gradient(kernel)
    print(f"{kernel.__name__}: {result:g}, gradient {found}")
    right = [0, 1, 0, 0] if kernel is by_atomic_min else [0, 0, 1, 0]
    assert result == (-1 if kernel is by_atomic_min else 2)
    assert found == (right if kernel is by_loop else [1, 1, 1, 1]), "the behaviour has changed"
PY
"$dir/venv/bin/python" "$dir/check.py"
