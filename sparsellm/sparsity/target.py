"""The controller that adjusts λ until `target_nnz` neurons are active for a token.

Users want a certain number of non-zeros, but the λ that leads to it depends on width, batch and
learning rate. After every step the controller compares the step's non-zeros (of all ranks) with the
target and changes log λ:

    e    = log(nnz / target)
    fast = mean of e over about 3 steps; slow = over about 12 (exponential)
    λ   ← λ · exp(pace · GAIN · clip(fast + LEAD · (fast - slow), ±MAX_ERROR))
    pace = the learning rate's share of its peak while it warms up, then 1

This is integral control of the error expected some 28 steps ahead (PI control in velocity form).
Non-zeros follow λ with a lag of 10 to 100 steps, and fall by themselves from half the width at the
start; looking ahead keeps λ from rising all that time. While the learning rate is small, non-zeros
cannot follow λ, so the factor ``pace`` slows λ down. Without it, a warm-up of 600 steps would take
λ hundreds of times too high, and too few neurons would be left alive. λ changes by at most 6% per
step and stays within a factor of 10,000 of the `l1_coefficient` that it starts at. The constants
were chosen on simulations of how non-zeros follow λ (tests/sparsity/test_target.py). They hold for
any width and batch, since only ratios enter.

The farther ahead the controller looks, the longer it takes to converge: an error shrinks to a third
in that many steps. The small learning rates at the end of a decay no longer move the non-zeros. So
give a run 400 steps or more. Simulated runs of 200 steps with a warm-up of 40 end up to 20% above
the target. Two small models, trained for 300 steps of only 1,024 tokens, ended 18 and 23% above it:
neurons that fell silent at first came back after λ had fallen a hundredfold.

Steps may have earlier targets. Where the target changes, also because a run resumes with another
one, the smoothed errors become those against the new one, as if it had always been the target.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

GAIN = 0.2  # of log λ per step, at an expected error of a factor e
LEAD = 3.0  # of the change of the error between slow and fast, 9 steps
FAST, SLOW = 0.3, 0.08  # weights of the newest step
MAX_ERROR = 0.3  # natural logarithm
MAX_FACTOR = 1e4  # of λ from where it started
FAR = 0.1  # from the target, natural logarithm
EARLY_STEPS = 100  # within which it shows that the initial λ is too high
KILLED = 0.05  # of the target: the initial λ is too high if it leaves fewer non-zeros
_FEWEST = 1e-3  # non-zeros per token: a lower bound, so that the logarithm always exists


class TargetSettings(Protocol):
    """What a controller needs to know; `recipe.sections.SparsityConfig` has it all."""

    @property
    def target_nnz(self) -> float | None:
        """Mean non-zeros per token; a controller needs one."""

    @property
    def target_per_layer(self) -> bool:
        """Each layer has its own λ."""

    @property
    def l1_coefficient(self) -> float:
        """Where λ starts."""

    @property
    def l1_zero_steps(self) -> int:
        """Steps at the start for which λ is zero."""


class TargetController:
    """λ of each layer, adjusted once per step; plain numbers that every rank computes alike.

    There is one control loop, or with `target_per_layer` one for each layer.

    Args:
        config: `target_nnz`, where λ starts, and whether layers have a λ each.
        num_layers: L.
        warmup_steps: of the learning rate.
        earlier_targets: steps before which another target applies, ascending, each with that.
        recipe: messages name the keys of a recipe, else arguments of the same names.
    """

    def __init__(
        self,
        config: TargetSettings,
        num_layers: int,
        warmup_steps: int = 0,
        *,
        earlier_targets: Sequence[tuple[int, float]] = (),
        recipe: bool = True,
    ) -> None:
        assert config.target_nnz is not None
        self._section, self._model = ("sparsity.", "model.") if recipe else ("", "")
        self._restart = "start over (--fresh)" if recipe else "start over"
        self._last_target, self._earlier_targets = config.target_nnz, earlier_targets
        self._target = self._target_at(0)  # of the smoothed errors
        self._start = math.log(config.l1_coefficient)
        self._dense_steps = config.l1_zero_steps
        self._num_layers = num_layers
        self._warmup_steps = warmup_steps
        loops = num_layers if config.target_per_layer else 1
        self._log_l1 = [self._start] * loops
        self._early = True  # within `EARLY_STEPS`
        self._fast: list[float] | None = None  # smoothed errors, one per loop
        self._slow: list[float] | None = None
        self._warned: set[str] = set()  # keys of obstacles that `new_warning` has reported

    def l1_by_layer(self, step: int) -> list[float]:
        """λ of each layer at a step (from 0): zero during the dense phase."""
        if step < self._dense_steps:
            return [0.0] * self._num_layers
        values = [math.exp(value) for value in self._log_l1]
        return values * (self._num_layers // len(values))

    def observe(self, step: int, nnz_L: list[float]) -> None:
        """Adjusts λ after a step, by the mean non-zeros per token of each layer in that step."""
        if step < self._dense_steps:
            return
        self._change_target(step)
        measured = nnz_L if len(self._log_l1) > 1 else [sum(nnz_L) / len(nnz_L)]
        errors = [math.log(max(nnz, _FEWEST) / self._target) for nnz in measured]
        self._fast = _smoothed(self._fast, errors, FAST)
        self._slow = _smoothed(self._slow, errors, SLOW)
        self._early = step < self._dense_steps + EARLY_STEPS
        limit = math.log(MAX_FACTOR)
        gain = GAIN * min(1.0, (step + 1) / max(self._warmup_steps, 1))
        for i, (fast, slow) in enumerate(zip(self._fast, self._slow, strict=True)):
            expected = fast + LEAD * (fast - slow)
            moved = self._log_l1[i] + gain * max(-MAX_ERROR, min(MAX_ERROR, expected))
            self._log_l1[i] = max(self._start - limit, min(self._start + limit, moved))

    def _change_target(self, step: int) -> None:
        before, self._target = self._target, self._target_at(step)
        if before != self._target and self._fast and self._slow:
            shift = math.log(before / self._target)
            self._fast = [error + shift for error in self._fast]
            self._slow = [error + shift for error in self._slow]

    def _target_at(self, step: int) -> float:
        passing = (target for end, target in self._earlier_targets if step < end)
        return next(passing, self._last_target)

    def target_change(self, step: int) -> str | None:
        """A sentence if the target at a step is not that of the steps observed before."""
        now = self._target_at(step)
        if now == self._target:
            return None
        return f"the target changes from {self._target:g} at step {step} to {now:g} at the next"

    @property
    def error(self) -> float | None:
        """Smoothed non-zeros over the target, minus one; of several loops, that furthest off."""
        return None if self._fast is None else math.expm1(max(self._fast, key=abs))

    def new_warning(self) -> str | None:
        """After a step: what keeps the non-zeros from the target, and the remedy; each once."""
        for key, text in self._obstacles():
            if key not in self._warned:
                self._warned.add(key)
                return text
        return None

    def final_warning(self) -> str | None:
        """At the end of a run: how far off the target it is, why, and the remedy; None if near."""
        error = self.error
        if error is None or abs(math.log1p(error)) < FAR:
            return None
        obstacles = dict(self._obstacles())
        why = "; ".join(obstacles.values())
        if not why and "killed" in self._warned:
            why = self._killed()
        if not why:
            l1 = final_l1(self.state_dict())
            why = f"λ was still moving: train longer, or start nearer, at λ {l1:.2g}"
        target = f"{self._section}target_nnz {self._target:g}"
        return f"non-zeros are {error:+.0%} off {target}: {why}"

    def _obstacles(self) -> Iterator[tuple[str, str]]:
        """What keeps the non-zeros from the target now: a key, and a sentence with the remedy."""
        limit, is_last = math.log(MAX_FACTOR), self._target == self._last_target
        key = f"{self._section}{'target_nnz' if is_last else 'target_schedule'} {self._target:g}"
        for i, (log_l1, error) in enumerate(zip(self._log_l1, self._fast or (), strict=False)):
            where = f"in layer {i} " if len(self._log_l1) > 1 else ""
            nnz = self._target * math.exp(error)
            at = f"{where}{nnz:.3g} neurons are active per token with λ at"
            if log_l1 <= self._start - limit and error < -FAR:
                yield (
                    "lowest",
                    f"{at} its lowest, {math.exp(log_l1):.2g}: even then fewer neurons are active "
                    f"than {key}; lower the target, or "
                    f"{self._restart} with a larger {self._model}intermediate_size or a lower "
                    f"{self._section}l1_coefficient",
                )
            elif log_l1 >= self._start + limit and error > FAR:
                yield (
                    "highest",
                    f"{at} its highest, {math.exp(log_l1):.2g}, more than {key}; raise the "
                    f"target, or {self._restart} with a higher {self._section}l1_coefficient",
                )
            elif self._early and error < math.log(KILLED):
                yield "killed", self._killed()

    def _killed(self) -> str:
        initial = math.exp(self._start)
        return (
            f"the initial L1 coefficient silenced nearly all neurons, and some may stay dead: "
            f"{self._restart} with a lower {self._section}l1_coefficient, such as "
            f"{initial / 100:.2g} instead of {initial:.2g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, of which JSON keeps every bit, and what `new_warning` has said."""
        return {
            "start": self._start,
            "target": self._target,
            "log_l1": self._log_l1,
            "fast": self._fast,
            "slow": self._slow,
            "said": sorted(self._warned),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores a `state_dict`; returns False and changes nothing if it has other loops."""
        if len(state["log_l1"]) != len(self._log_l1):
            return False
        self._log_l1, self._fast, self._slow = (state[k] for k in ("log_l1", "fast", "slow"))
        self._target = state.get("target", self._target)
        self._start = state["start"]  # the limits stay, whatever sparsity.l1_coefficient is now
        self._warned = set(state["said"])
        return True


def final_l1(state: dict[str, Any]) -> float:
    """The λ that a controller's `state_dict` ended with; of several loops, their geometric mean."""
    return math.exp(sum(state["log_l1"]) / len(state["log_l1"]))


def _smoothed(before: list[float] | None, new: list[float], weight: float) -> list[float]:
    if before is None:
        return new
    return [old + weight * (value - old) for old, value in zip(before, new, strict=True)]
