#!/bin/sh
# Question: a byte-level model keeps its text as a uint8 tensor. What do labels == -100, tokens > -1 and tokens < 256 give?
#   And lengths < 50_000 for lengths in int16?
# Guess: False, True, True and True everywhere, as in Python and NumPy; or an error, as for tokens.fill_(300).
# Seen (torch 2.13.0, CPU): labels == -100 is True for the byte 156, tokens > -1 and tokens < 256 are False everywhere, and
#   so is lengths < 50_000. A Python integer that does not fit the tensor's type is cut to its lowest bits before it is
#   compared. torch.isin, masked_fill and torch.where cut it too: torch.where(mask, tokens, -100) stores 156. A uint16
#   tensor finds -100 at token 65,436. Floats (> -0.5) and tensors of shape (1,) are compared rightly. There is no message.
# Hurts: byte-level models, and checks of packed token files and of lengths: labels of the byte 156, the second of Ü in
#   UTF-8, are ignored; a mask that is False everywhere trains on nothing, and a check of the range of tokens refuses, or
#   lets pass, all. Convert with .long() before comparing.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch

tokens = torch.arange(256, dtype=torch.uint8)
lengths = torch.tensor([5, 300], dtype=torch.int16)
wide = torch.tensor([5, 65_436], dtype=torch.uint16)
seen = {
    "uint8 == -100": tokens == -100,
    "uint8 > -1": tokens > -1,
    "uint8 < 256": tokens < 256,
    "uint8 > 300": tokens > 300,
    "torch.isin(uint8, -100)": torch.isin(tokens, -100),
    "int16 < 50_000": lengths < 50_000,
    "uint16 == -100": wide == -100,
}
right = {
    "uint8 == -100": tokens.numpy() == -100,
    "uint8 > -1": tokens.numpy() > -1,
    "uint8 < 256": tokens.numpy() < 256,
    "uint8 > 300": tokens.numpy() > 300,
    "torch.isin(uint8, -100)": torch.isin(tokens.long(), -100).numpy(),
    "int16 < 50_000": lengths.numpy() < 50_000,
    "uint16 == -100": wide.numpy() == -100,
}
for name, mask in seen.items():
    print(f"{name}: True for {mask.sum()} of {mask.numel()}; rightly for {right[name].sum()}")
stored = torch.where(tokens < 5, tokens, -100).unique().tolist()
filled = tokens.masked_fill(tokens > 5, -100).unique().tolist()
print(f"where(…, -100) stores {stored}, masked_fill(…, -100) {filled}")
try:
    tokens.clone().fill_(300)
    raise AssertionError("fill_ accepts 300")
except RuntimeError as error:
    print(f"fill_(300): {error}")
assert (tokens > -0.5).all() and not (tokens == torch.tensor([-100])).any() and not (tokens.long() == -100).any()
assert all((seen[name].numpy() != right[name]).any() for name in seen), "the behaviour has changed"
assert seen["uint8 == -100"].nonzero().tolist() == [[156]], "the behaviour has changed"
assert not seen["uint8 > -1"].any() and not seen["uint8 < 256"].any() and not seen["int16 < 50_000"].any()
assert stored[-1] == filled[-1] == 156, "the behaviour has changed"
PY
