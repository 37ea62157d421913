#!/bin/sh
# Question: mlx_lm.lora (and full fine-tuning with MLX-LM) reports train and validation loss over rows of unequal length.
#   Is it the mean over the tokens of all rows? Is each row used once per epoch?
# Guess: yes: rows are padded, and the lengths are handed to the loss so that padding does not count. A last, smaller batch
#   is used or dropped at random.
# Seen (mlx-lm 0.32.2, mlx 0.32.4, CPU, a small random model): each row counts one token of padding, as if text ended with
#   token 0: the mask goes one place too far. Training teaches it, so that it soon costs nothing, and the loss is too small:
#   for answers of two tokens with masked prompts, by a third. Rows are sorted by length, and the remainder of the division
#   by the batch size is cut off at the end: the longest rows are left out of every epoch, and of validation. (The padding
#   is known: mlx-lm pull request 1697, closed.)
# Hurts: losses and perplexities compared with other tools, or between data of other lengths; data sets of a few long
#   examples, which are never trained on.
# To use an existing Python that has the packages, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile "mlx[cpu]==0.32.4" mlx-lm==0.32.2 numpy==2.4.6
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.tuner.trainer import default_loss, evaluate, iterate_batches

mx.set_default_device(mx.cpu)
mx.random.seed(0)
model = llama.Model(llama.ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=64))
model.update(tree_map(lambda weight: 0.25 * mx.random.normal(weight.shape) if weight.ndim > 1 else weight,
                      model.parameters()))  # fmt: skip
generator = np.random.default_rng(0)


def losses(tokens, start):  # of the tokens from start on
    logits = model(mx.array([tokens[:-1]]))
    return np.array(nn.losses.cross_entropy(logits, mx.array([tokens[1:]])))[0, max(start, 1) - 1 :]


def measured(rows, batch_size):
    return float(evaluate(model, rows, batch_size=batch_size, num_batches=-1, max_seq_length=2048, loss=default_loss,
                          iterate_batches=iterate_batches))  # fmt: skip


cases = {"whole rows": [(length, 0) for length in (5, 9, 30, 31)], "answers of two tokens": [(20, 18), (30, 28), (9, 7)]}
for name, shapes in cases.items():
    rows = [(generator.integers(3, 64, length).tolist(), start) for length, start in shapes]
    right = np.concatenate([losses(tokens, start) for tokens, start in rows])
    padded = np.concatenate([losses(tokens + [0], start) for tokens, start in rows])
    seen = measured(rows, 1)
    print(f"{name}: loss {seen:.4f}; of the {len(right)} tokens {right.mean():.4f}; of {len(padded)} tokens, with a 0 "
          f"after each row, {padded.mean():.4f}; once the 0 is learnt, {right.sum() / len(padded):.4f}")
    assert abs(seen - padded.mean()) < 1e-3 < abs(seen - right.mean()), "the behaviour has changed"
rows = [([7] * length, 0) for length in (5, 100, 9, 30, 70, 12, 8)]
for batch_size in (2, 4):
    used = set()
    for _, lengths in iterate_batches(rows, batch_size, 2048):
        used |= {int(end) for _, end in lengths.tolist()}
    print(f"batches of {batch_size}: lengths of the rows {[len(tokens) for tokens, _ in rows]}; used {sorted(used)}")
    assert used == set(sorted(len(tokens) for tokens, _ in rows)[: len(rows) // batch_size * batch_size])
PY
