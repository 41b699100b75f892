"""A whole sweep in which cells take turns: from the command line to its cells' ratios."""

import json
from collections.abc import Callable

import pytest

SWEEP = ("sweep", "--pair", "tiny", "--requests", "2", "--max-new-tokens", "6", "--batches", "24")

pytestmark = pytest.mark.usefixtures("own_surroundings", "engine")


@pytest.mark.slow  # a whole sweep with many windows
def test_the_ratio_of_a_sweep_is_that_of_windows_in_turn(
    command_line: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = command_line(*SWEEP, "--interleave", "windows", "--output", "run", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["violations"] == []
    cells = {cell["cell"]: cell for cell in told["cells"]}
    for name in ("off x off (A/A)", "stage x off", "stage x graph"):
        cell = cells[name]
        assert (cell["interleaved"], cell["compared"]) == ("windows", "wall_ms")
        assert cell["groups"] > 10
        assert cell["ratio_to_off"] == pytest.approx(1, abs=0.01)
        assert cell["ratio_batches"] == 1
        assert cell["verdict"] == "SAME"
    # The made-up engine's control does nothing of its own.
    assert cells["control x off"]["verdict"] == "INEFFECTIVE"
    assert told["split"] == []
    assert command_line("report", "run", "--json") == (0, out, "")
