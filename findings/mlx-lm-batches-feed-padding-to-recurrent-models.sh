#!/bin/sh
# Question: MLX-LM generates for several prompts at once (batch_generate, the server, evaluations), greedily. Has each row
#   the text that its prompt has alone?
# Guess: yes. Shorter prompts are padded on the left, and MLX-LM hands masks and offsets to its caches for that; models
#   whose caches cannot be batched are refused ("does not yet support batching").
# Seen (mlx-lm 0.32.2, mlx 0.32.4, CPU, fp32, small random models): so it is for Llama, Mamba 2 and LFM2.
#   Mamba, Jamba, RecurrentGemma and Baichuan-M1 read the padding: their layers run over its tokens (0) as over
#   text, so that every row but the longest gets another text than alone. Nothing warns.
# Hurts: benchmarks and served answers of these models: the answer to a prompt depends on what else is in the batch. Of
#   rows of equal length, all are right, so that tests with one prompt show nothing.
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
from mlx_lm.generate import BatchGenerator, generate_step

TOKENS, LENGTHS = 16, (4, 9, 30)
mx.set_default_device(mx.cpu)
shape = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, vocab_size=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
             max_position_embeddings=512)  # fmt: skip
mamba = dict(state_size=8, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4)
cases = {  # the settings, and whether the rows are right
    "llama": ({}, True),
    "mamba2": (mamba | dict(num_heads=8, state_size=16, n_groups=1, time_step_limit=(0.0, float("inf")),
                            layer_norm_epsilon=1e-5, chunk_size=8), True),
    "lfm2": (dict(norm_eps=1e-5, conv_bias=False, conv_L_cache=3, block_dim=64, block_ff_dim=96, block_multiple_of=8,
                  block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False, full_attn_idxs=[1]), True),
    "mamba": (mamba, False),
    "jamba": (dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4,
                   mamba_d_state=8, mamba_expand=2, num_experts=2, num_experts_per_tok=1, mamba_dt_rank=4), False),
    "recurrent_gemma": (dict(attention_bias=False, conv1d_width=4, logits_soft_cap=30.0, lru_width=64,
                             attention_window_size=64, embeddings_scale_by_sqrt_dim=True,
                             block_types=["recurrent", "attention"], _block_types=["recurrent", "attention"]), False),
    "baichuan_m1": (dict(num_swa_attention_heads=4, num_swa_key_value_heads=2, sliding_window=64,
                         sliding_window_layers=[0], conv_window=2), False),
}  # fmt: skip
for kind, (options, right) in cases.items():
    mx.random.seed(0)
    module = importlib.import_module("mlx_lm.models." + kind)
    model = module.Model(module.ModelArgs.from_dict(dict(model_type=kind) | shape | options))
    model.update(tree_map(lambda weight: mx.random.normal(weight.shape) * 0.25 if weight.ndim > 1 else weight,
                          model.parameters()))  # fmt: skip
    prompts = [mx.random.randint(3, 64, (length,)).tolist() for length in LENGTHS]
    alone = [[int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS)] for prompt in prompts]

    def batched(batch):
        generator = BatchGenerator(model, max_tokens=TOKENS, stop_tokens=[], prefill_batch_size=4)
        rows = {row: [] for row in generator.insert(batch)}
        while any(len(row) < TOKENS for row in rows.values()):
            for response in generator.next()[1]:
                rows[response.uid].append(response.token)
        return list(rows.values())

    seen, same_length = batched(prompts), batched([prompts[0]] * 3)
    equal = [sum(a == b for a, b in zip(*pair)) for pair in zip(seen, alone)]
    print(f"{kind}: of {TOKENS} tokens, those that agree with the prompt alone, by length {LENGTHS}: {equal}; "
          f"in a batch of equal lengths: {same_length == [alone[0]] * 3}")
    assert equal[-1] == TOKENS and same_length == [alone[0]] * 3
    assert (min(equal) == TOKENS) == right, "the behaviour has changed"
PY
