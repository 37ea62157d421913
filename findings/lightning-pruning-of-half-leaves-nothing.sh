#!/bin/sh
# Question: Lightning's callback ModelPruning("l1_unstructured", amount=0.5), the first example of its documentation, prunes
#   a model that is trained for 10 epochs. How many weights are zero, and how are the others trained?
# Guess: half are zero. The others have trained for 10 epochs.
# Seen (lightning 2.6.6, torch 2.13.0): 99.9%. At the end of each epoch, half of the weights that are left are pruned, so
#   1/1024 is left. And after the first epoch the weights that are left go back to their first values, so its training is
#   lost: use_lottery_ticket_hypothesis is True by default. That happens once only, and not in each epoch: the copy of the
#   first weights is assigned by `.data` without a copy, so the optimizer trains it too, and later resets change nothing.
#   With verbose=0, the default, there is no message.
# Hurts: those who prune during training: the model ends with hardly a weight, which looks as if pruning by magnitude did
#   not work, and its first epoch is undone. Comparisons with lottery tickets are not what they say. Set amount to a
#   function that returns 0.5 in one epoch and 0 in others, and use_lottery_ticket_hypothesis=False.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 lightning==2.6.6 numpy==2.4.6
fi
"$PYTHON" -W ignore - <<'PY'
import logging

import lightning
import torch
from lightning.pytorch.callbacks import ModelPruning

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 64, generator=generator)
rows = torch.utils.data.TensorDataset(x, x[:, :8].sum(1).sin())


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.out = torch.nn.Linear(64, 128), torch.nn.Linear(128, 1)
        self.first = self.up.weight.detach().clone()
        self.moved = []

    def training_step(self, batch, index):
        return (self.out(self.up(batch[0]).relu())[:, 0] - batch[1]).square().mean()

    def on_train_epoch_start(self):
        weight = getattr(self.up, "weight_orig", self.up.weight)
        self.moved.append(round((weight - self.first).norm().item(), 2))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def run(epochs=10, **options):
    """The share of zeros after training, and how far the weights are from the first ones as each epoch begins."""
    model = Model()
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=[(model.up, "weight")], **options)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[pruning], enable_checkpointing=False, **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=16))
    zeros = (model.up.weight == 0).float().mean().item()
    print(f"{ {key: str(value)[:9] for key, value in options.items()} }: {zeros:.2%} are zero, moved {model.moved}")
    return zeros, model.moved


print("lightning", lightning.__version__, "torch", torch.__version__)
zeros, moved = run(amount=lambda epoch: 0.5 if epoch == 0 else 0.0, use_lottery_ticket_hypothesis=False)
assert abs(zeros - 0.5) < 0.001 and moved[1] > 0
assert run(1, amount=0.5)[0] == 0.5
zeros, moved = run(amount=0.5)
assert zeros > 0.999 and moved[1] == 0 and moved[2] > 0, "the behaviour has changed"
assert run(amount=0.5, use_lottery_ticket_hypothesis=False)[0] > 0.999, "the behaviour has changed"
PY
