"""Agreement of ranks that score different rows: if one fails or must stop, all end together."""

from __future__ import annotations

from typing import Protocol


class Agreement(Protocol):
    """How the ranks that evaluate together agree on stopping."""

    def interrupted(self) -> bool:
        """Whether this rank was asked to stop; asked before each batch."""

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank where one has an error or was interrupted; every rank calls it."""


class InterruptedHere(Exception):
    """This rank leaves its rows, to agree with the others."""
