"""Words in messages."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Such as "1 layer" and "2,048 layers"; ``plural`` is ``noun`` with an s unless given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
