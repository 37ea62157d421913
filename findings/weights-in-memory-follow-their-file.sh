#!/bin/sh
# Question: a model is loaded on the CPU by from_pretrained, or by safetensors' load_file and load_state_dict(assign=True).
#   It is trained. Then cp, or shutil.copy, puts another checkpoint of the same size over the file. What are the weights of
#   the model in memory?
# Guess: the trained ones.
# Seen (safetensors 0.8.0, transformers 5.23.0, torch 2.13.0, Linux): those of the new file; the training is gone. Tensors
#   of the same dtype as in the file are a private mapping of it, and a copy empties the file first, which drops the pages
#   of the mapping, changed ones too. A frozen reference model changes as well. Nothing warns. save_file itself is safe: it
#   renames a new file over the old; so are os.replace, load_state_dict without assign, and a load that casts.
# Hurts: whoever copies "last" over "best" or a newer base over the old while a run, a reference model, a merge or an
#   evaluation on the CPU has it loaded.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 safetensors==0.8.0 transformers==5.23.0 numpy==2.4.6
fi
export CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1
"$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import os
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

folder = sys.argv[1]
config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
torch.manual_seed(0)
for name in ("first", "second"):
    LlamaForCausalLM(config).save_pretrained(f"{folder}/{name}")
    shutil.copytree(f"{folder}/{name}", f"{folder}/{name}-kept")


def by_transformers(dtype=None):
    return AutoModelForCausalLM.from_pretrained(f"{folder}/first", dtype=dtype)


def by_safetensors(assign):
    model = LlamaForCausalLM(config)
    model.load_state_dict(load_file(f"{folder}/first/model.safetensors"), assign=assign)
    return model


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = torch.randint(512, (2, 16))
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def rename(source, target):
    shutil.copyfile(source, target + ".new")
    os.replace(target + ".new", target)


def save(source, target):
    save_file({name: tensor.clone() for name, tensor in load_file(source).items()}, target, {"format": "pt"})


cases = [
    ("from_pretrained, copyfile", by_transformers, shutil.copyfile, "second"),
    ("load_file with assign, copyfile", lambda: by_safetensors(True), shutil.copyfile, "second"),
    ("load_file without assign, copyfile", lambda: by_safetensors(False), shutil.copyfile, "trained"),
    ("from_pretrained in bf16, copyfile", lambda: by_transformers(torch.bfloat16), shutil.copyfile, "trained"),
    ("from_pretrained, os.replace", by_transformers, rename, "trained"),
    ("from_pretrained, save_file", by_transformers, save, "trained"),
]
second = LlamaForCausalLM.from_pretrained(f"{folder}/second-kept").state_dict()
matrix = "model.layers.1.mlp.down_proj.weight"
for name, load, write, expected in cases:
    shutil.copyfile(f"{folder}/first-kept/model.safetensors", f"{folder}/copy")
    os.replace(f"{folder}/copy", f"{folder}/first/model.safetensors")
    model = load()
    train(model)
    trained = model.state_dict()[matrix].clone()
    write(f"{folder}/second-kept/model.safetensors", f"{folder}/first/model.safetensors")
    weight = model.state_dict()[matrix]
    seen = "trained" if torch.equal(weight, trained) else "second" if torch.equal(weight, second[matrix]) else "mixed"
    print(f"{name}: the weights in memory are those of: {seen}")
    assert seen == expected, "the behaviour has changed"
PY
