"""The result of a kernel run: its rows, and whether they meet the speed goals. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nwor_bench.microbench.cases import EMPTY, FLASH, L2, STOCK, LaunchMode, Spec
from nwor_bench.microbench.rows import Row, Status
from nwor_bench.records.environment import Environment


class Verdict(StrEnum):
    """Verdict on a goal, from the intervals of all its cases."""

    MET = "met"
    MISSED = "missed"
    UNCLEAR = "unclear"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Goal:
    """A speed goal: the peer's time over ours is at least `bound` in each case.

    `applies` selects the cases among the graph-captured ones.
    """

    text: str
    kernel: str
    peer: str
    bound: float
    applies: Callable[[Row], bool]


@dataclass(frozen=True)
class GoalResult:
    """A goal's verdict, the number of cases that meet it, and the worst case."""

    goal: Goal
    verdict: Verdict
    cases: int
    met: int
    worst: Row | None


GOALS = (
    Goal(
        "commit, 32 staged tokens: stock writes layer by layer take at least 8 times as long",
        "commit", STOCK, 8.0, lambda row: row.staged_tokens == 32,
    ),
    Goal(
        "commit, 512 staged tokens: stock writes layer by layer take at least 1.5 times as long",
        "commit", STOCK, 1.5, lambda row: row.staged_tokens == 512,
    ),
    Goal(
        "stage: no slower than the stock write of the same tokens",
        "stage", STOCK, 1.0, lambda row: True,
    ),
    Goal(
        "mask, warm L2: at most 1.1 times the time of an empty kernel",
        "mask", EMPTY, 1 / 1.1, lambda row: row.l2 is L2.WARM,
    ),
    Goal(
        "verify_attention, bf16, k = 4, 8 and 64 requests: 0.95 of FlashAttention 3's speed",
        "verify_attention", FLASH, 0.95,
        lambda row: row.cache_dtype == "bf16" and row.drafts == 4 and row.requests in (8, 64),
    ),
)  # fmt: skip


def goal_results(rows: Sequence[Row]) -> list[GoalResult]:
    """Results of the goals whose kernels were measured."""
    kernels = {row.kernel for row in rows}
    return [_goal_result(goal, rows) for goal in GOALS if goal.kernel in kernels]


def _goal_result(goal: Goal, rows: Sequence[Row]) -> GoalResult:
    cases = [
        (row.time_over_nwor, row.time_over_nwor_low, row.time_over_nwor_high, row)
        for row in rows
        if (row.kernel, row.implementation, row.launch)
        == (goal.kernel, goal.peer, LaunchMode.GRAPH)
        and row.status is Status.OK
        and goal.applies(row)
    ]
    known = [(r, low, high, row) for r, low, high, row in cases if r and low and high]
    if not known:
        return GoalResult(goal, Verdict.NOT_MEASURED, 0, 0, None)
    met = sum(low >= goal.bound for _, low, _, _ in known)
    worst = min(known, key=lambda case: case[0])[3]
    missed = any(high < goal.bound for _, _, high, _ in known)
    verdict = Verdict.MISSED if missed else Verdict.MET
    if not missed and met < len(known):
        verdict = Verdict.UNCLEAR
    return GoalResult(goal, verdict, len(known), met, worst)


@dataclass(frozen=True)
class Result:
    """One kernel run.

    Attributes:
        command: the command line.
        facts: facts about the device: `gpu`, `l2_bytes`, `copy_gb_per_s`.
        environment: from `nwor_bench.instruments.environment.collect`.
    """

    spec: Spec
    rows: Sequence[Row]
    command: str
    facts: dict[str, Any]
    environment: Environment
    elapsed_s: float

    @property
    def goals(self) -> list[GoalResult]:
        """Results of the goals whose kernels were measured."""
        return goal_results(self.rows)

    @property
    def invalid(self) -> list[Row]:
        """Rows whose implementation gave a wrong result."""
        return [row for row in self.rows if row.status is Status.INVALID]
