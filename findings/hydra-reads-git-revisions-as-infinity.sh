#!/bin/sh
# Question: a run is started with `revision=84e3000`, the short git revision of a dataset or model, on Hydra's command
#   line, or with `revision: 84e3000` in a config. What does cfg.revision hold? And `run=2024_11_28`?
# Guess: the strings. A float of YAML 1.1 has a point, and 2024_11_28 is no number.
# Seen (omegaconf 2.3.1, hydra-core 1.3.8): infinity, and the number 20241128. OmegaConf reads floats without a point, so
#   that 1e-4 is a number, and a revision whose only letter is one e, between digits, is one too, mostly beyond the range
#   of floats; digits joined by _ are an integer, by YAML's rules too. Of short revisions of 7 digits, 1 in 50 is
#   a float and 1 in 30 an integer; in a file, 0123456 is octal. Quotes within quotes help: 'revision="84e3000"'.
# Hurts: records of what was trained on which data: the revision "inf" cannot be recovered, and folders named after
#   cfg.run lose their underscores. It occurs for one revision in 20, and so passes every test.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile omegaconf==2.3.1 hydra-core==1.3.8 pyyaml==6.0.3
fi
"$PYTHON" - "$dir" <<'PY'
import pathlib
import random
import sys

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

folder = pathlib.Path(sys.argv[1], "conf")
folder.mkdir()
text = "revision: 84e3000\nrun: 2024_11_28\n"
folder.joinpath("config.yaml").write_text("revision: none\nrun: none\n")
with initialize_config_dir(str(folder), version_base=None):
    command_line = compose("config", ["revision=84e3000", "run=2024_11_28"])
    quoted = compose("config", ['revision="84e3000"', 'run="2024_11_28"'])
seen = {
    "Hydra's command line": command_line,
    "Hydra's command line, quoted": quoted,
    "OmegaConf's file": OmegaConf.create(text),
    "PyYAML": yaml.safe_load(text),
}
for name, config in seen.items():
    print(f"{name}: revision {config['revision']!r}, run {config['run']!r}")
random.seed(0)
revisions = [f"{random.getrandbits(28):07x}" for _ in range(5_000)]
config = OmegaConf.from_dotlist([f"r{i}={revision}" for i, revision in enumerate(revisions)])
kinds = [type(value).__name__ for value in config.values()]
print({kind: kinds.count(kind) for kind in set(kinds)}, "among 5,000 random revisions of 7 digits")
assert quoted.revision == "84e3000" and quoted.run == "2024_11_28" and seen["PyYAML"]["revision"] == "84e3000"
for config in (command_line, seen["OmegaConf's file"]):
    assert config.revision == float("inf") and config.run == 20241128, "the behaviour has changed"
assert kinds.count("float") > 50 and kinds.count("int") > 100, "the behaviour has changed"
PY
