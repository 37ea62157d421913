"""How ranks that score different rows end together, where one fails or all are asked to stop."""

from __future__ import annotations

from typing import Protocol


class Agreement(Protocol):
    """Of the ranks that evaluate together."""

    def interrupted(self) -> bool:
        """Whether this rank was asked to stop; asked before each batch."""

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank where one has an error or was interrupted; every rank calls it."""


class InterruptedHere(Exception):
    """This rank leaves its rows, to agree with the others."""
