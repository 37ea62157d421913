"""What a process of several knows of the others before torch is imported."""

from __future__ import annotations


class EndedByAnother(RuntimeError):
    """This rank ends because of another one, which has said why."""

    def __init__(self) -> None:
        super().__init__("another rank failed")
