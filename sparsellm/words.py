"""Words in messages."""

from collections.abc import Iterable


def counted(number: int, noun: str, plural: str = "") -> str:
    """Such as "1 layer" and "2,048 layers"; ``plural`` is ``noun`` with an s unless given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def listed(names: Iterable[str]) -> str:
    """The first name, and how many more there are."""
    first, *more_names = names
    return f"{first} and {len(more_names)} more" if more_names else first
