"""Words in messages and tables."""

from collections import defaultdict
from collections.abc import Iterable, Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """Such as "1 layer" and "2,048 layers"; ``plural`` is ``noun`` with an s unless given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def listed(names: Iterable[str]) -> str:
    """The first name, and how many more there are."""
    first, *more_names = names
    return f"{first} and {len(more_names)} more" if more_names else first


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown that ends with a line break."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def reasons(left_alone: dict[str, str]) -> list[str]:
    """One line for each reason, of the modules that were left alone for it."""
    by_reason = defaultdict(list)
    for name, why in left_alone.items():
        by_reason[why].append(name or "the model itself")
    return [f"{listed(names)}: {why}" for why, names in by_reason.items()]
