"""The saved position of the global stream, and the data for which it is valid."""

from collections.abc import Sequence
from typing import Any

from sparsellm.data.stream import choose_num_groups
from sparsellm.data.text.corpus import Corpus
from sparsellm.data.text.identity import fingerprint

FORMAT = 2


class DataStateMismatch(ValueError):
    """A saved position belongs to other data, or is of another format."""


def saved_groups(state: dict[str, Any], corpora: Sequence[Corpus]) -> tuple[int, ...]:
    """The groups of lanes that a saved position was made with; those of a new corpus are chosen."""
    saved, num_lanes = state["groups"], state["num_lanes"]
    return tuple(saved.get(c.name) or choose_num_groups(c.train, num_lanes) for c in corpora)


def merge(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the states of all ranks, saved at the same step, into one.

    Raises:
        DataStateMismatch: they are not of the format `FORMAT`.
        ValueError: they are not of one step, or a rank is missing.
    """
    if not states:
        raise ValueError("no data position was saved; resume from another checkpoint")
    if any(state.get("format") != FORMAT for state in states):
        raise DataStateMismatch(
            "the data position was saved by another version of sparsellm, in a format that this "
            "one does not know"
        )
    numbers = {state["number"] for state in states}
    if len(numbers) > 1:
        raise ValueError(f"the ranks' data positions belong to different steps: {sorted(numbers)}")
    lanes: dict[str, Any] = {}
    for state in states:
        for lane, saved in state["lanes"].items():
            # Ranks that share a lane have each saved it after their own last sequence.
            if lane not in lanes or saved["number"] > lanes[lane]["number"]:
                lanes[lane] = saved
    num_lanes, number = states[0]["num_lanes"], states[0]["number"]
    for lane in range(min(num_lanes, number)):
        last = lane + (number - 1 - lane) // num_lanes * num_lanes
        if lanes.get(str(lane), {"number": None})["number"] != last:
            raise ValueError(
                f"the data position of lane {lane} is missing: the position of one rank "
                "was not saved. Resume from an older checkpoint"
            )
    return dict(states[0]) | {"lanes": {lane: lanes[lane] for lane in sorted(lanes, key=int)}}


def compare(saved: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Checks that the data of a saved position is what a run has; returns harmless changes.

    Raises:
        DataStateMismatch: it was saved with another seed or tokenizer; no corpus is left; or the
            text of one has changed.
    """
    for key in ("seed", "tokenizer", "eot_id"):
        before, now = saved[key], present[key]
        if before != now:
            label = "end-of-document id" if key == "eot_id" else key
            raise DataStateMismatch(
                f"the data position was saved with {label} {before!r} and this run has {now!r}"
            )
    saved_corpora, present_corpora = saved["corpora"], present["corpora"]
    if not saved_corpora.keys() & present_corpora.keys():
        raise DataStateMismatch(
            f"the data position is of corpus {', '.join(saved_corpora)} and this run reads "
            f"{', '.join(present_corpora)}"
        )
    for name in sorted(saved_corpora.keys() & present_corpora.keys()):
        if saved_corpora[name] != present_corpora[name]:
            raise DataStateMismatch(
                f"the files of corpus {name} are not those that the data position was saved with: "
                "one was added, removed, renamed or changed, or its text is in another column"
            )
    notes = [
        f"corpus {name} begins at its beginning again, since its position was not kept while it "
        "was not read"
        if saved["tokens"].get(name)
        else f"corpus {name} is new and begins at its beginning"
        for name in present_corpora
        if name not in saved_corpora
    ]
    notes += [
        f"corpus {name} is no longer read" for name in saved_corpora if name not in present_corpora
    ]
    for name, witness in present["witnesses"].items():
        notes += _compare_witnesses(name, saved["witnesses"].get(name), witness)
    before = saved["held_out"]  # without those of new corpora; of no shards: there were no losses
    notes += [
        f"the held-out text of corpus {name} has changed: losses before and after are of other text"
        for name, held_out in present["held_out"].items()
        if before.get(name, held_out) not in (held_out, fingerprint(()))
    ]
    return notes


def _compare_witnesses(corpus: str, saved: str | None, present: str | None) -> list[str]:
    """A sentence if the files of a corpus with an unchanged fingerprint may have been edited."""
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
        "beginnings, middles and ends are as before, and the rest is too large to compare. If one "
        "was edited, restore it: the stream would not be the one that the run began with"
    ]
