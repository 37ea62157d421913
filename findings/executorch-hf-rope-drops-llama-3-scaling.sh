#!/bin/sh
# Question: a Llama 3.1 from Hugging Face is run by ExecuTorch's Llama. Its parameters say use_scaled_rope=true with the
#   model's rope_scale_factor, and use_hf_rope=true, since the weights have Hugging Face's order. Are the logits the same?
# Guess: yes, or the pair of options is refused. Each of them is right alone.
# Seen (executorch 1.5.1, transformers 5.24.0, torch 2.13.0, CPU, fp32, a small random model): use_scaled_rope is ignored
#   with use_hf_rope, without a message: all rotations are unscaled, and the logits are off by 1% of their spread over the
#   first 128 tokens and 18% over 2,048. Without scaling, both agree. With Meta's order of the weights (use_hf_rope
#   off), the rotations are right for Llama 3.1, but the original length is always 8,192: original_max_position_embeddings
#   is not read, and a model of another length has wrong rotations.
# Hurts: exported fine-tunes of Llama 3.1 and 3.2: short answers look good, and long texts get worse with their length.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 executorch==1.5.1 numpy==2.4.6
fi
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
from executorch.examples.models.llama.llama_transformer import construct_transformer
from executorch.examples.models.llama.model_args import ModelArgs
from executorch.examples.models.llama.rope import Rope
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 2048
names = (("model.", ""), ("embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("self_attn", "attention"),
         ("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv"), ("o_proj", "wo"), ("mlp.gate_proj", "feed_forward.w1"),
         ("mlp.down_proj", "feed_forward.w2"), ("mlp.up_proj", "feed_forward.w3"), ("input_layernorm", "attention_norm"),
         ("post_attention_layernorm", "ffn_norm"))  # fmt: skip
tokens = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(0))


def hugging_face(original):
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=original) if original else dict(rope_type="default")  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, rms_norm_eps=1e-5, max_position_embeddings=131_072,
        rope_parameters=scaling | dict(rope_theta=500_000.0))).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.15) if weight.dim() > 1 else None
    return model


def settings(original, hf):
    return ModelArgs(dim=64, n_layers=2, n_heads=1, n_kv_heads=1, hidden_dim=96, vocab_size=64, max_seq_len=LENGTH,
                     max_context_len=LENGTH, rope_theta=500_000.0, norm_eps=1e-5, generate_full_logits=True,
                     use_hf_rope=hf, use_scaled_rope=bool(original), rope_scale_factor=8,
                     original_max_position_embeddings=original)  # fmt: skip


with torch.no_grad():
    for original in (None, 8192):
        reference, model = hugging_face(original), construct_transformer(settings(original, hf=True)).eval()
        weights = {}
        for key, weight in reference.state_dict().items():
            for old, new in names:
                key = key.replace(old, new) if old != "model." else key.removeprefix(old)
            weights[key] = weight
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
        wanted, seen = reference(tokens).logits, model(tokens)[0]
        error = ((seen - wanted).abs().mean(-1) / wanted.std()).flatten()
        print(f"use_hf_rope, {'scaled' if original else 'unscaled'}: error of the logits {error[:128].mean():.3f} of their "
              f"spread over 128 tokens, {error.mean():.3f} over {LENGTH:,}")
        assert error.max() < 1e-3 if original is None else error.mean() > 0.02, "the behaviour has changed"
    for original in (8192, 4096):
        frequencies = hugging_face(original).model.rotary_emb.inv_freq
        table = Rope(settings(original, hf=False)).freqs_sin[1].asin()  # the angle of position 1
        off = float((table / frequencies - 1).abs().max())
        print(f"Meta's order, original length {original:,}: frequencies {off:.0%} off")
        assert off < 1e-4 if original == 8192 else off > 0.1, "the behaviour has changed"
PY
