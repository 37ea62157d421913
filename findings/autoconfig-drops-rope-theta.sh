#!/bin/sh
# Question: AutoConfig.from_pretrained(folder, rope_theta=1e6), or `config.rope_theta = 1e6`, is how scripts gave a
#   model another RoPE base, to continue its training with a longer context. Does the model get it?
# Guess: yes, or an error.
# Seen (transformers 5.23.0): no, and there is no message. The base is now an entry of config.rope_parameters;
#   `rope_theta` is an attribute that nothing reads, and from_pretrained drops the argument. The model keeps 10,000.
#   LlamaConfig(rope_theta=1e6) and a config.json with "rope_theta" work.
# Hurts: scripts for longer contexts that were written for transformers 4. They train with the old base, and learn only
#   from the loss at long contexts that something is wrong.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.23.0
fi
"$PYTHON" - "$dir" <<'PY'
import sys

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
folder = f"{sys.argv[1]}/model"
LlamaConfig(**sizes, num_attention_heads=1, rope_theta=1e4).save_pretrained(folder)


def base(config):
    """The RoPE base that a model of this config uses."""
    rope = AutoModelForCausalLM.from_config(config).model.rotary_emb
    return round(rope.inv_freq[1].item() ** -16)  # inv_freq[i] = base ** (-2 i / 32)


changed = AutoConfig.from_pretrained(folder)
changed.rope_theta = 1e6
right = AutoConfig.from_pretrained(folder)
right.rope_parameters = {**right.rope_parameters, "rope_theta": 1e6}
seen = {
    "as saved": base(AutoConfig.from_pretrained(folder)),
    "from_pretrained(folder, rope_theta=1e6)": base(AutoConfig.from_pretrained(folder, rope_theta=1e6)),
    "config.rope_theta = 1e6": base(changed),
    "config.rope_parameters": base(right),
    "LlamaConfig(rope_theta=1e6)": base(LlamaConfig(**sizes, num_attention_heads=1, rope_theta=1e6)),
}
for name, value in seen.items():
    print(f"{name}: {value:,}")
values = [round(value, -2) for value in seen.values()]
assert values[0] == 10_000 and [round(value, -4) for value in values[3:]] == [1_000_000] * 2
assert values[1:3] == [10_000] * 2, "the behaviour has changed"
PY
