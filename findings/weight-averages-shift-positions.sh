#!/bin/sh
# Question: Lightning's EMAWeightAveraging(decay=0.9999) keeps a moving average of a BERT, validates with it, and leaves
#   it in the model when training ends. BERT has a buffer of the positions, 0, 1, 2, …, as integers. What is it
#   afterwards?
# Guess: the same. Buffers are averaged too, by default, but the average of a number with itself is that number.
# Seen (Lightning 2.6.6, torch 2.13.0, transformers 5.24.0): 18% of the positions are too small by one. The average is
#   computed in fp32, 0.9999 * 11 + 0.0001 * 11 = 10.999999, and is cut to the integer 10. Tokens 10 and 11 have the same
#   position from then on. Below, BERT has learned labels that depend on the position; with the average as Lightning
#   leaves it, 16% of its answers are wrong, and none once the positions are repaired. The same holds for
#   torch.optim.swa_utils.AveragedModel(model, avg_fn=get_ema_avg_fn(decay), use_buffers=True), which Lightning uses. It
#   depends on the decay: 0.9, 0.95, 0.9995 and 0.9999 shift, 0.99, 0.995, 0.998 and 0.999, the default, do not.
# Hurts: averages of models with integer buffers (positions of BERT and CLIP, relative positions of Swin): they are
#   validated as worse than they are, and so are those exported or evaluated from memory. transformers does not save these
#   buffers, so a model that is saved and loaded is right again. use_buffers=False leaves buffers alone.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 transformers==5.24.0 lightning==2.6.6
fi
cd "$dir"
HF_HUB_OFFLINE=1 "$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import logging

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn
from transformers import BertConfig, BertForTokenClassification

LENGTH, LABELS = 256, 16
for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    """A BERT that learns a label for each position, whatever the token is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.labels = torch.randint(0, LABELS, (LENGTH,))
        self.bert = BertForTokenClassification(
            BertConfig(vocab_size=16, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                       max_position_embeddings=LENGTH, num_labels=LABELS)
        )  # fmt: skip

    def training_step(self, tokens, _):
        return self.bert(input_ids=tokens, labels=self.labels.repeat(len(tokens), 1)).loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)

    @torch.no_grad()
    def wrong(self, tokens):
        return (self.bert.eval()(input_ids=tokens).logits.argmax(-1) != self.labels).float().mean().item()


def fit(model, steps, *callbacks):
    batches = torch.utils.data.DataLoader(torch.randint(0, 16, (8 * steps, LENGTH)), batch_size=8)
    lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, callbacks=list(callbacks), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, batches)  # fmt: skip


tests = torch.randint(0, 16, (8, LENGTH))
positions = torch.arange(LENGTH)
for decay in (0.9, 0.95, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999):
    average = get_ema_avg_fn(decay)(positions, positions, 1).long()
    print(f"decay {decay}: {(average != positions).sum()} of {LENGTH} positions change in one average with themselves")
    assert (average != positions).any() == (decay in (0.9, 0.95, 0.9995, 0.9999)), "the behaviour has changed"

model = Model()
fit(model, 100)
print(f"trained without averages: {model.wrong(tests):.1%} of the answers are wrong")
fit(model, 10, EMAWeightAveraging(decay=0.9999))
buffer = model.bert.bert.embeddings.position_ids[0]
changed = (buffer != positions).float().mean().item()
before = model.wrong(tests)
print(f"10 more steps with the average: {changed:.1%} of the positions differ, the first are {buffer[:24].tolist()}; "
      f"{before:.1%} of the answers are wrong")
buffer.copy_(positions)
after = model.wrong(tests)
print(f"positions repaired: {after:.1%} of the answers are wrong")
assert changed > 0.1 and before > 0.1 and after < 0.02, "the behaviour has changed"
PY
