"""How long each neuron has been silent: over all ranks, never counted twice.

L layers, N intermediate_size.
"""

import torch
from torch import Tensor


class SparsityStats:
    """How long each neuron has been silent, and how often it was active in the last window.

    Args:
        num_layers: L.
        intermediate_size: N.
        window_tokens: a neuron silent for at least this many tokens is dead.
        device: where the numbers live.
    """

    def __init__(
        self, num_layers: int, intermediate_size: int, window_tokens: int, device: torch.device
    ) -> None:
        self.window_tokens = window_tokens
        shape = (num_layers, intermediate_size)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        # All steps, all ranks; saved with the checkpoint.
        self.silent_tokens_LN = zeros(*shape)
        self.window_fired_LN = zeros(*shape)
        self.window_seen_tokens = zeros()
        self.activity_LN = zeros(*shape)  # of the last complete window
        self.activity_tokens = zeros()

    @torch.no_grad()
    def advance(self, active_LN: Tensor, num_tokens: int | Tensor, refused: Tensor) -> None:
        """Adds a step, unless it is refused; the host does not wait for that.

        Args:
            active_LN: number of tokens, of all ranks, for which each neuron was active.
            num_tokens: of the step, over all ranks.
            refused: (), not zero if the step does not count.
        """
        accepted = refused == 0
        active_LN, tokens = (active_LN * accepted).long(), accepted * num_tokens
        silent = active_LN == 0
        self.silent_tokens_LN = torch.where(silent, self.silent_tokens_LN + tokens, 0)
        self.window_fired_LN += active_LN
        self.window_seen_tokens += tokens
        # No branch: the host would wait here for the device, and the GPU then for the host.
        complete = self.window_seen_tokens >= self.window_tokens
        for last, window in (
            (self.activity_LN, self.window_fired_LN),
            (self.activity_tokens, self.window_seen_tokens),
        ):
            last.copy_(torch.where(complete, window, last))
            window.masked_fill_(complete, 0)

    def dead_LN(self) -> Tensor:
        """(L, N) bool: neurons that have been silent for at least `window_tokens`."""
        return self.silent_tokens_LN >= self.window_tokens

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run goes on from."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores a `state_dict`, on this device."""
        for name in _STATE:
            getattr(self, name).copy_(state[name])


_STATE = (
    "silent_tokens_LN",
    "window_fired_LN",
    "window_seen_tokens",
    "activity_LN",
    "activity_tokens",
)
