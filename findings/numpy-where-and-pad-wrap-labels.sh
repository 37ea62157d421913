#!/bin/sh
# Question: tokens are read from a packed file as uint16. The labels are np.where(answer, tokens, -100), or the row is
#   padded by np.pad(tokens, (0, 8), constant_values=-100). What stands at the ignored places?
# Guess: -100, in a wider type, as from NumPy 1; or OverflowError, as NumPy 2 raises for tokens + -100, np.full(8, -100,
#   np.uint16), np.maximum and tokens[places] = -100.
# Seen (numpy 2.4.6): 65436, of type uint16, without a message. Numbers from 65536 on are cut too: np.where(mask, tokens,
#   70_000) stores 4464, a token of the vocabulary. np.select does the same, and for uint8 -100 becomes the byte 156.
#   Since NumPy 2 a Python number takes the type of the array, and these functions then convert it without the check that
#   arithmetic has. np.ma.where and NumPy numbers (np.int64(-100)) are right.
# Hurts: labels for training: the loss finds no -100 to ignore. Vocabularies of 65,536 tokens, or bytes in uint8,
#   are trained to predict the token 65436 or the byte 156 all over the prompt; smaller ones meet an index out of range,
#   on a GPU far from its cause. Write np.where(answer, tokens.astype(np.int64), -100).
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import numpy as np

tokens = np.array([5, 60_000, 7, 65_535], np.uint16)
answer = np.array([False, False, True, True])
seen = {
    "np.where(answer, tokens, -100)": np.where(answer, tokens, -100),
    "np.where(answer, tokens, 70_000)": np.where(answer, tokens, 70_000),
    "np.select([answer], [tokens], -100)": np.select([answer], [tokens], -100),
    "np.pad(tokens[2:], (2, 0), constant_values=-100)": np.pad(tokens[2:], (2, 0), constant_values=-100),
    "np.where(answer, bytes, -100)": np.where(answer, tokens.astype(np.uint8), -100),
}
for name, labels in seen.items():
    print(f"{name} = {labels.tolist()}, {labels.dtype}")
raising = {
    "tokens + -100": lambda: tokens + -100,
    "np.maximum(tokens, -100)": lambda: np.maximum(tokens, -100),
    "np.full(4, -100, np.uint16)": lambda: np.full(4, -100, np.uint16),
    "np.putmask(tokens, answer, -100)": lambda: np.putmask(tokens.copy(), answer, -100),
    "tokens[answer] = -100": lambda: tokens.copy().__setitem__(answer, -100),
}
for name, call in raising.items():
    try:
        call()
    except OverflowError as error:
        print(f"{name}: {error}")
    else:
        raise AssertionError(f"{name} is not refused")
right = [-100, -100, 7, 65_535]
assert np.where(answer, tokens, np.int64(-100)).tolist() == right
assert np.where(answer, tokens.astype(np.int64), -100).tolist() == right
assert np.ma.where(answer, tokens, -100).tolist() == right
wrapped = [values.tolist()[:2] for values in seen.values()]
assert wrapped == [[65_436] * 2, [4_464] * 2, [65_436] * 2, [65_436] * 2, [156] * 2], "the behaviour has changed"
PY
