#!/bin/sh
# Question: a Llama is made deeper by copies of its layers, layers = ModuleList([deepcopy(layers[i]) for i in 0, 1, 2, 1, 2,
#   3]), with config.num_hidden_layers set, as in depth up-scaling. It is evaluated by model(tokens, labels=tokens) and by
#   generate, before it is saved. Are logits, loss and text those of the deeper model?
# Guess: yes; or an error, since each layer keeps a number for its place in the cache.
# Seen (transformers 5.24.0, torch 2.13.0; Llama, Mistral and Qwen3; GPT-2 is alike): only with use_cache=False. A copy has
#   the layer_idx of its original, so both put keys and values into one place of the cache, and a copy gets its original's
#   keys before its own. use_cache is True by default, for a plain forward pass too; and without padding SDPA gets no mask,
#   but is_causal=True, which aligns queries with the first keys. So in the pass that fills the cache, each copy reads only
#   the keys and values of its original, and none of its own. Logits are off by more than a standard deviation, text
#   differs, and the copies' own keys have no gradient. Eager attention stops with an error, as mask and keys differ in
#   length. Saved and loaded, the model is right; so it is if each layer's self_attn.layer_idx is set.
# Hurts: up-scaling and experiments with repeated layers: scores and samples of the new model, and its training in an own
#   loop, are those of another model than the one that is saved.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 numpy==2.4.6
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import copy
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
tokens = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(0))


def deeper(config):
    """A random model of four layers, made one of six by copies."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15)
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList([copy.deepcopy(layers[i]) for i in (0, 1, 2, 1, 2, 3)])
    model.config.num_hidden_layers = 6
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = ["full_attention"] * 6
    return model


def look(model, right):
    """Error of the logits in standard deviations, 12 tokens of text, norm of the gradient of a copy's keys."""
    model.zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    text = model.generate(tokens[:, :8], max_new_tokens=12, do_sample=False)[0, 8:].tolist()
    error = (out.logits.detach() - right).abs().max() / right.std()
    return error.item(), text, model.model.layers[3].self_attn.k_proj.weight.grad.norm().item()


print("transformers", transformers.__version__, "torch", torch.__version__)
for config in (LlamaConfig(**sizes), MistralConfig(**sizes, sliding_window=None), Qwen3Config(**sizes)):
    model = deeper(config)
    with torch.no_grad():
        right = model(tokens, use_cache=False).logits
    error, text, gradient = look(model, right)
    model.save_pretrained(sys.argv[1] + "/model")
    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model").eval()
    its_error, its_text, its_gradient = look(loaded, right)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    numbered_error, numbered_text, _ = look(model, right)
    print(f"{config.model_type}, with copies: error {error:.4f}, gradient of a copy's keys {gradient:.3f}, text {text}")
    print(f"    saved and loaded: error {its_error:.4f}, gradient {its_gradient:.3f}, text {its_text}")
    print(f"    numbered: error {numbered_error:.4f}")
    assert its_error < 1e-3 and numbered_error < 1e-3 and its_text == numbered_text and its_gradient > 0
    assert error > 0.5 and text != its_text and gradient == 0, "the behaviour has changed"
PY
