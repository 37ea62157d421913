#!/bin/sh
# Question: an own model class of transformers (a PreTrainedModel) has an _init_weights in the usual style,
#   module.weight.data.normal_(). It is trained, saved with save_pretrained and loaded with from_pretrained. Are all of its
#   weights the trained ones?
# Guess: yes. _init_weights is for weights that the checkpoint lacks.
# Seen (torch 2.13.0, transformers 5.24.0): not in a layer that also has a buffer with persistent=False. Its weights are
#   loaded, and then drawn anew, without a message; missing, unexpected and mismatched keys are empty. A bias that the
#   checkpoint lacks has the weight of its layer drawn anew as well, and only the bias is reported. transformers 4.57.6 and
#   load_state_dict keep all weights, and so does an _init_weights that calls nn.init.normal_(module.weight), which
#   from_pretrained replaces while it loads. transformers' own Youtu has such a line: loading sets the embedding of the
#   padding token to zero, and the logit of the end of text with it where the two tokens are one and the head is tied.
# Hurts: own architectures after an update to transformers 5: routers with counters, pruned layers with masks, layers with
#   tables of their own lose what they have learned at each load, evaluation and resumption included.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0
fi
"$PYTHON" -W ignore - "$dir" <<'PY'
import sys

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, YoutuConfig

transformers.logging.disable_progress_bar()


class Config(PretrainedConfig):
    model_type = "own"


class Router(nn.Module):
    """Scores of 8 experts, and a count of how often each was chosen."""

    def __init__(self, config, persistent):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 32))
        self.register_buffer("chosen", torch.zeros(8), persistent=persistent)


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.saved_count = Router(config, persistent=True)
        self.unsaved_count = Router(config, persistent=False)
        self.linear = nn.Linear(32, 32, bias=getattr(config, "bias", False))
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, Router)):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()


class Guarded(Model):
    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, Router)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


def changed(before, after):
    after = after.state_dict()
    return [name for name, weight in before.state_dict().items() if not torch.equal(weight, after[name])]


folder = sys.argv[1] + "/model"
print("transformers", transformers.__version__)
expected = {Model: ([], ["unsaved_count.weight"], ["unsaved_count.weight", "linear.weight"]), Guarded: ([], [], [])}
for cls in (Model, Guarded):
    model = cls(Config())
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()  # the trained weights
    model.save_pretrained(folder)
    copy = cls(Config())
    copy.load_state_dict(model.state_dict())
    found = (
        changed(model, copy),
        changed(model, cls.from_pretrained(folder)),
        changed(model, cls.from_pretrained(folder, config=Config(bias=True))),
    )
    print(f"{'.data.normal_' if cls is Model else 'nn.init.normal_'}: weights that load_state_dict changes: {found[0]}")
    print(f"  that from_pretrained changes: {found[1]}, with a new bias: {found[2]}")
    assert found == expected[cls], "the behaviour has changed"

latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(YoutuConfig(**sizes, **latent, bos_token_id=0, eos_token_id=1))
model.config.pad_token_id = 1
model.save_pretrained(folder)
row = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight[1]
norms = [float(weight.norm()) for weight in (model.get_input_embeddings().weight[1], row)]
print("Youtu with pad_token_id = eos_token_id: norm of that token's embedding, saved {:.2f}, loaded {:.2f}".format(*norms))
assert norms[0] > 1 and norms[1] == 0, "the behaviour has changed"
PY
