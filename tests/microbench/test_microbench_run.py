"""A run on a bench without a GPU: what is wrong, refused or late is listed and never timed."""

from dataclasses import replace
from itertools import count

import pytest
from fake_bench import NO_VLLM, make_bench

from nwor_bench.microbench.bench import Bench, fault_of, run_groups
from nwor_bench.microbench.cases import OURS, PEER, Spec, Window, expand
from nwor_bench.microbench.rows import Implementation, RefusedError, Row, Status, with_peers

SPEC = Spec(windows=(Window(8, 4),), acceptances=(0.5,), max_rounds=5)


def run(bench: Bench) -> list[Row]:
    return run_groups(bench, expand(bench.spec), lambda group, rows: None)


def of(rows: list[Row], name: str, kernel: str = "commit") -> list[Row]:
    return [row for row in rows if (row.implementation, row.kernel) == (name, kernel)]


def test_every_implementation_has_a_line_in_every_case() -> None:
    rows = run(make_bench(replace(SPEC, kernels=tuple(PEER)), refused=NO_VLLM))
    for kernel, peer in PEER.items():
        for name in (OURS, peer):
            heads = 2 if kernel == "verify_attention" else 1
            assert len(of(rows, name, kernel)) == 2 * heads  # cache dtypes
    assert [row.implementation for row in rows[:2]] == [OURS, PEER["commit"]]


def test_what_is_wrong_is_not_timed() -> None:
    bench = make_bench(SPEC, wrong={"vllm_cuda": "layer 3: 7 bytes"})
    rows = run(bench)
    wrong = of(rows, "vllm_cuda")
    assert {row.status for row in wrong} == {Status.INVALID}
    assert {row.reason for row in wrong} == {"layer 3: 7 bytes"}
    assert {row.time_us for row in wrong} == {None}
    assert "vllm_cuda" not in bench.stopwatch.replayed
    assert {row.status for row in of(rows, OURS)} == {Status.OK}


def test_when_ours_is_wrong_the_peers_are_timed_without_a_ratio() -> None:
    rows = run(make_bench(SPEC, wrong={OURS: "an error flag"}))
    assert {row.status for row in of(rows, OURS)} == {Status.INVALID}
    stock = of(rows, "vllm_cuda")
    assert all(row.time_us and row.time_over_nwor is None for row in stock)


def test_what_cannot_be_captured_is_refused() -> None:
    rows = run(make_bench(SPEC, cannot=frozenset({"vllm_cuda"})))
    for row in of(rows, "vllm_cuda"):
        assert (row.status, row.time_us) == (Status.REFUSED, None)
        assert row.reason == "RuntimeError: cannot be captured"


def test_our_own_error_is_not_swallowed() -> None:
    with pytest.raises(RuntimeError, match="cannot be captured"):
        run(make_bench(SPEC, cannot=frozenset({OURS})))


def test_inputs_that_do_not_fit_are_a_refusal() -> None:
    bench = make_bench(SPEC)

    def build(group):
        if group.kernel == "commit":
            raise MemoryError
        return bench.build(group)

    rows = run(replace(bench, build=build))
    assert {row.status for row in of(rows, OURS)} == {Status.REFUSED}
    assert {row.status for row in of(rows, OURS, "verify_attention")} == {Status.OK}


def fails() -> str:
    raise OSError("libcuda.so: not found\nmore")


def test_a_peer_that_raises_is_refused_and_ours_may_not() -> None:
    peer = Implementation("vllm_cuda", 1, 8, [], fails)
    assert fault_of(peer) == (Status.REFUSED, "OSError: libcuda.so: not found")
    with pytest.raises(OSError, match="libcuda"):
        fault_of(replace(peer, name=OURS))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RefusedError("vLLM is not installed"), "vLLM is not installed"),
        (AttributeError("no such operator"), "AttributeError: no such operator"),
    ],
)
def test_a_peer_that_cannot_be_made_is_listed(error: Exception, reason: str) -> None:
    ours = Implementation(OURS, 1, 8, [], str)

    def make() -> Implementation:
        raise error

    made = with_peers(ours, {"vllm_cuda": make})
    assert [each.name for each in made.runnable] == [OURS]
    assert made.refused == {"vllm_cuda": reason}


@pytest.mark.parametrize("grows", [True, False])
def test_rounds_under_throttled_clocks_say_so(grows: bool) -> None:
    rows = run(make_bench(SPEC, throttled=count(0, 5 if grows else 0)))
    assert {row.reason for row in rows} == {"the GPU throttled its clocks" if grows else ""}
    assert all(row.time_us for row in rows)
