"""The ``--device`` of commands that use a trained model."""

from __future__ import annotations

import torch


def pick_device(name: str | None) -> torch.device:
    """A device by name; without one, a GPU if there is one.

    Raises:
        ValueError: there is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name}: {reason}; give cpu, cuda or cuda:N") from error
    return device
