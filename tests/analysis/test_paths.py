"""Paths that were timed and never gated."""

from dataclasses import replace

from synthetic_run import make_run

from nwor_bench.analysis.cell_data import ungated_paths
from nwor_bench.records.types import WindowRecord

WINDOW = make_run(blocks=1, windows=1).windows[0]


def window(path: str | None, num_reqs: int = 8, batch: int = 9) -> WindowRecord:
    return replace(WINDOW, path=path, num_reqs=num_reqs, batch=batch)


def test_a_timed_path_must_be_one_of_the_gates() -> None:
    gated = [window("full graph, ours, joined", batch=1), window(None, batch=1)]
    timed = [
        window(path) for path in ("full graph, ours, joined", "full graph, merge, ready", None)
    ]
    timed += [window("full graph, ours, ready", batch=10), *timed]
    assert ungated_paths(gated, timed) == ("full graph, merge, ready", "full graph, ours, ready")
    assert ungated_paths([*gated, *timed], timed) == ()


def test_windows_of_older_versions_have_no_path_and_need_none() -> None:
    assert ungated_paths([], [window(None)]) == ()


def test_a_batch_that_runs_out_has_sizes_by_chance() -> None:
    gated = [window("full graph, ours4, ready")]
    timed = [window("full graph, ours4, ready"), window("full graph, ours, ready", num_reqs=7)]
    assert ungated_paths(gated, timed) == ()
    assert ungated_paths(gated, [*timed, window("full graph, ours, ready")])
