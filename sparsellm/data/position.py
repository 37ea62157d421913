"""The saved position of the global stream, and the data for which it is valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import Len
from pydantic import BaseModel, NonNegativeInt, PositiveInt, StringConstraints

from sparsellm.data.lanes import LaneState, Picks, StreamConfig
from sparsellm.data.stream import MIN_UNITS_PER_LANE, Cursor

FORMAT = 2


class _SavedLane(BaseModel):
    number: NonNegativeInt
    cursors: dict[str, Annotated[list[int], Len(len(Cursor._fields), len(Cursor._fields))]]


class SavedPosition(BaseModel):
    """What a ``rank_….json`` of `FORMAT` holds."""

    format: int
    seed: int
    tokenizer: str
    corpora: dict[str, str]
    number: NonNegativeInt
    num_lanes: PositiveInt
    tokens: dict[str, NonNegativeInt]
    lanes: dict[Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")], _SavedLane]


class DataStateMismatch(ValueError):
    """A saved position belongs to other data, or is of an earlier version."""


@dataclass(frozen=True)
class Position:
    """The sequences that all ranks together have returned so far.

    A rank knows the lanes that it has read; `merge` combines the ranks' positions.
    """

    num_lanes: int
    number: int = 0  # of the next sequence
    lanes: dict[int, LaneState] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # targets so far, by corpus


def saved_groups(state: dict[str, Any], config: StreamConfig) -> tuple[int | None, ...]:
    """The groups of lanes that a saved position was made with; None for a corpus that is new."""
    groups = state.get("groups")
    if groups is None:
        # In earlier versions a lane had whole shards of its own, or all lanes shared all shards.
        lanes = state["num_lanes"]
        groups = {
            corpus.name: lanes if len(corpus.train) >= MIN_UNITS_PER_LANE * lanes else 1
            for corpus in config.corpora
            if corpus.name in state["corpora"]
        }
    return tuple(groups.get(corpus.name) for corpus in config.corpora)


def advance(position: Position, number: int, config: StreamConfig) -> Position:
    """The same lanes with ``number`` as the next sequence, and the tokens counted up to it."""
    counts = Picks(config.corpora, config.seed).counts(position.number, number)
    tokens = dict(position.tokens)
    for corpus, count in zip(config.corpora, counts, strict=True):
        tokens[corpus.name] = tokens.get(corpus.name, 0) + count * config.context_length
    return replace(position, number=number, tokens=tokens)


def to_json(position: Position, names: list[str]) -> dict[str, Any]:
    """A position as plain lists, dicts and numbers; ``names`` are the corpora's."""
    return {
        "number": position.number,
        "num_lanes": position.num_lanes,
        "tokens": position.tokens,
        "lanes": {
            str(lane): {
                "number": state.number,
                "cursors": dict(zip(names, map(list, state.cursors), strict=True)),
            }
            for lane, state in sorted(position.lanes.items())
        },
    }


def from_json(state: dict[str, Any], names: list[str]) -> Position:
    """What `to_json` gave; a corpus that is new begins at its beginning.

    Raises:
        DataStateMismatch: it was saved by a version before `FORMAT`.
    """
    _check_format(state)
    lanes = {
        int(lane): LaneState(
            saved["number"],
            tuple(Cursor(*saved["cursors"].get(name, Cursor())) for name in names),
        )
        for lane, saved in state["lanes"].items()
    }
    return Position(state["num_lanes"], state["number"], lanes, dict(state["tokens"]))


def _check_format(state: dict[str, Any]) -> None:
    if state.get("format") != FORMAT:
        raise DataStateMismatch(
            "the data position was saved by an earlier version of sparsellm, which bound it to the "
            "number of ranks and workers"
        )


def merge(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the states of all ranks, saved at the same step, into one.

    Raises:
        DataStateMismatch: they were saved by a version before `FORMAT`.
        ValueError: they are not of one step, or a rank is missing.
    """
    if not states:
        raise ValueError("no data position was saved; resume from another checkpoint")
    for state in states:
        _check_format(state)
    numbers = {state["number"] for state in states}
    if len(numbers) > 1:
        raise ValueError(f"the ranks' data positions are not of one step: {sorted(numbers)}")
    lanes: dict[str, Any] = {}
    for state in states:
        for lane, saved in state["lanes"].items():
            # Ranks that share a lane each have it as of their own last sequence.
            if lane not in lanes or saved["number"] > lanes[lane]["number"]:
                lanes[lane] = saved
    _check_complete(lanes, states[0]["num_lanes"], states[0]["number"])
    return dict(states[0]) | {"lanes": {lane: lanes[lane] for lane in sorted(lanes, key=int)}}


def _check_complete(lanes: dict[str, Any], num_lanes: int, number: int) -> None:
    for lane in range(min(num_lanes, number)):
        last = lane + (number - 1 - lane) // num_lanes * num_lanes
        if lanes.get(str(lane), {"number": None})["number"] != last:
            raise ValueError(
                f"the data position of lane {lane} is missing: that of one rank "
                "was not saved. Resume from an older checkpoint"
            )


def compare_corpora(saved: dict[str, str], present: dict[str, str]) -> list[str]:
    """What was added and removed, as sentences.

    Raises:
        DataStateMismatch: no corpus is left, or the fingerprint of one has changed.
    """
    if not saved.keys() & present.keys():
        raise DataStateMismatch(
            f"the data position is of corpus {', '.join(saved)} and this run reads "
            f"{', '.join(present)}"
        )
    for name in sorted(saved.keys() & present.keys()):
        if saved[name] != present[name]:
            raise DataStateMismatch(
                f"the files of corpus {name} are not those that the data position was saved with: "
                "one was added, removed, renamed or changed, or another of its columns is the text"
            )
    added = [
        f"corpus {name} is new and begins at its beginning" for name in present if name not in saved
    ]
    return added + [f"corpus {name} is no longer read" for name in saved if name not in present]


def compare_witnesses(corpus: str, saved: str | None, present: str | None) -> list[str]:
    """Compares two witnesses of a corpus whose fingerprint has not changed.

    Returns a sentence if its files may have been edited, else nothing.

    Raises:
        DataStateMismatch: a file has other content.
    """
    if saved is None or present is None or saved == present:
        return []
    kinds = {saved.split()[0], present.split()[0]}
    if kinds == {"contents"}:
        raise DataStateMismatch(
            f"a file of corpus {corpus} was edited since the data position was saved; its name and "
            "size are as before"
        )
    if kinds != {"times"}:
        return []
    return [
        f"files of corpus {corpus} were written since: edited or only copied? Their names, sizes, "
        "begins, middles and ends are as before, and the rest is too large to compare. If one was "
        "edited, restore it: the stream would not be the one that the run began with"
    ]
