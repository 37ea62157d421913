#!/bin/sh
# Question: MLX-LM generates with a draft model (draft_model=, --draft-model: speculative decoding), greedily. Is the text
#   the one that the model writes alone?
# Guess: yes, to the token: drafts that the model rejects are taken out of its cache again. Where a cache cannot go back,
#   as that of Mamba, MLX-LM refuses ("requires a trimmable prompt cache").
# Seen (mlx-lm 0.32.2, mlx 0.32.4, CPU, small random models): not for models with sliding windows (Gemma 3, gpt-oss,
#   Cohere 2). Their caches are rings, which count as ones that can go back as long as the window is not full; this is
#   checked once, at the start. Once the text is longer than the window, rejected tokens stay in the ring in place of true
#   ones, and the text is another one. Up to there, and with models without windows, all tokens agree. Nothing warns.
#   (mlx-lm issue 1423.)
# Hurts: speed-ups by drafts for such models: from the 128th to the 4,096th token on, depending on the model's window, the
#   answers are not the model's, and benchmarks of short answers do not show it.
# To use an existing Python that has the packages, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile "mlx[cpu]==0.32.4" mlx-lm==0.32.2 numpy==2.4.6
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import importlib

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step

WINDOW, PROMPT, TOKENS = 32, 10, 60
mx.set_default_device(mx.cpu)
shape = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, vocab_size=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False)  # fmt: skip
window = dict(sliding_window=WINDOW, sliding_window_pattern=2)
cases = {  # the settings, and whether the texts agree
    "llama": ({}, True),
    "qwen3": (dict(max_position_embeddings=512), True),
    "gemma3_text": (window | dict(query_pre_attn_scalar=16), False),
    "cohere2": (window | dict(layer_norm_eps=1e-5, logit_scale=1.0), False),
    "gpt_oss": (window | dict(num_local_experts=4, num_experts_per_tok=2), False),
}


def made(kind, options):
    module = importlib.import_module("mlx_lm.models." + kind)
    model = module.Model(module.ModelArgs.from_dict(dict(model_type=kind) | shape | options))
    weights = tree_map(lambda weight: mx.random.normal(weight.shape) * 0.25 if weight.ndim > 1 else weight,
                       model.parameters())  # fmt: skip
    model.update(weights)
    return model, weights


for kind, (options, agrees) in cases.items():
    mx.random.seed(0)
    model, weights = made(kind, options)
    draft, _ = made(kind, options)  # much like the model
    draft.update(tree_map(lambda weight: weight + 0.05 * mx.random.normal(weight.shape) * (weight.ndim > 1), weights))
    prompt = mx.random.randint(3, 64, (PROMPT,))
    alone = [int(token) for token, _ in generate_step(prompt, model, max_tokens=TOKENS)]
    drafts = [(int(token), taken)
              for token, _, taken in speculative_generate_step(prompt, model, draft, max_tokens=TOKENS)]  # fmt: skip
    equal = [token == other for token, (other, _) in zip(alone, drafts)]
    first = equal.index(False) if not all(equal) else None
    print(f"{kind}: {sum(equal)} of {TOKENS} tokens agree, {sum(taken for _, taken in drafts)} are from the draft; "
          + ("" if first is None else f"the first other one is token {PROMPT + first} (window: {WINDOW})"))
    if agrees:
        assert all(equal)
    else:
        assert not all(equal) and PROMPT + first >= WINDOW - 4, "the behaviour has changed"
PY
