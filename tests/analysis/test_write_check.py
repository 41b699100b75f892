"""The gate's check of writes: its words, and that a cell that fails it is INVALID."""

import re

import pytest
from fake_engine import FakeEngine
from tiny_session import RUN, begin

from nwor_bench.analysis.parity.kv import write_fault
from nwor_bench.errors import ExitCode
from nwor_bench.records.store import read_run
from nwor_bench.records.types import NworMode

SOUND = {"windows": 4, "early": 0, "uneven": 0, "written": 7, "without_slot": 0}


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([], None),
        ([SOUND], None),
        ([SOUND, SOUND], None),
        ([{**SOUND, "early": 3}], "3 staged rows were written before their commit"),
        ([SOUND, {**SOUND, "uneven": 1}], "in every layer alike on rank 1"),
        ([{**SOUND, "written": 8}], "8 drafts are in the cache .* but 7 were accepted"),
        ([{**SOUND, "written": 6}], "6 drafts are in the cache .* but 7 were accepted"),
        ([{**SOUND, "written": 6, "without_slot": 1}], None),  # beyond the model's length
        ([{**SOUND, "windows": 0, "written": 0}], None),  # nothing was staged
    ],
)
def test_what_the_writes_say(ranks: list[dict[str, int]], says: str | None) -> None:
    found = write_fault(ranks, accepted=7)
    if says is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith("writes: ")
        assert re.search(says, found)


@pytest.mark.slow
@pytest.mark.usefixtures("own_surroundings")
def test_a_cell_that_writes_early_is_invalid() -> None:
    engine = FakeEngine()
    switched: list[tuple[bool, str]] = []

    def watch_writes(on: bool) -> list[dict[str, int]]:
        assert engine.cell is not None
        switched.append((on, engine.cell.label))
        graph = engine.cell.label == "stage x graph"
        return [{**SOUND, "windows": int(graph), "early": int(graph)}]

    engine.watch_writes = watch_writes  # type: ignore[method-assign]
    assert begin(engine) is ExitCode.CORRECTNESS_BROKEN
    run = read_run(RUN)
    broken = run.header.parity.broken
    assert broken == {"stage x graph": "writes: 1 staged rows were written before their commit"}
    timed = {b.scv_mode for b in run.batches if b.phase == "timed" and b.nwor_mode == "stage"}
    assert timed == {"off", "adaptive"}  # a broken cell is not timed
    cells = {label for _, label in switched}
    assert all(label.startswith(str(NworMode.STAGE)) for label in cells)
    assert [on for on, _ in switched] == [True, False] * len(cells)  # the gate's batch alone
