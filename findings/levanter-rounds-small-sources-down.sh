#!/bin/sh
# Question: Levanter's MixtureDataset mixes a web corpus with weight 0.5 and 150 small sources with weights from 0.0005 to
#   0.008 that add up to 0.5. The block size is the default of its recipes, 2,048. What shares do the sources have?
# Guess: their weights. What rounding changes in one block evens out over many.
# Seen (marin-levanter 0.2.20, the development release of 2026-06-18): each block of 2,048 holds the same whole number of
#   sequences per source, weight times 2,048 rounded down, and what is left over goes to the largest source, in every
#   block. Nothing evens out: a source of weight 0.0009 (1.84 per block) has 54% of its share for the whole run, and web
#   has 53.6% instead of 50%. Only a source that gets none at all is reported, by a warning. The documentation says that
#   the number of each source is the same in all blocks, but not that it is rounded down.
# Hurts: mixtures of many domains or languages, and studies of mixtures: the small ones are trained up to half less than
#   the recipe says. Raise the block size, up to 65,535, or group the small sources.
# Packages: JAX and torch are large downloads. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  release=0.2.20.dev202606180959
  "$PYTHON" -m pip install --quiet --no-compile marin-levanter==$release marin-haliax==$release gitpython==3.2.1
fi
JAX_PLATFORMS=cpu "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import asyncio
import importlib.metadata
from collections import Counter

import jax
import numpy as np
from levanter.data import ListAsyncDataset
from levanter.data.mixture import MixtureDataset
from levanter.data.text import LmDataConfig

block = LmDataConfig.__dataclass_fields__["mixture_block_size"].default
print("marin-levanter", importlib.metadata.version("marin-levanter"), "block size", block)
small = np.geomspace(0.0005, 0.008, 150)
weights = {f"source{number}": weight for number, weight in enumerate(0.5 * small / small.sum())} | {"web": 0.5}
sources = {name: ListAsyncDataset([name] * 5) for name in weights}
for size in (block, 65535):
    mixture = MixtureDataset(sources, weights, size, key=jax.random.PRNGKey(0), stop_strategy="restart")
    rows = Counter(asyncio.run(mixture.get_batch(range(4 * size))))
    shares = {name: rows[name] / (4 * size) for name in weights}
    kept = np.array([shares[name] / weights[name] for name in weights if name != "web"])
    print(f"blocks of {size:,}: web has {shares['web']:.1%} instead of 50.0%; the small sources have {kept.min():.0%} to "
          f"{kept.max():.0%} of their weights, {(kept < 0.8).sum()} of {len(kept)} less than 80%, {(kept == 0).sum()} none")
    if size == block:
        assert shares["web"] > 0.52 and 0 < kept.min() < 0.6 and kept.max() <= 1, "the behaviour has changed"
PY
