"""What attends a window of each size: chosen by times, stored, shared, or taken from a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from nwor_bench.plugin.runner_v2.attention_choice import (
    AttentionChoices,
    AttentionKind,
    AttentionShape,
    ChoiceStore,
)
from nwor_bench.plugin.runner_v2.attention_decision import (
    NEVER,
    Choice,
    Contender,
    DirectLengths,
    decide,
    direct_lengths,
)

SHAPE = AttentionShape("FlashAttentionImpl", 24, 8, 128, 128, "bfloat16", "auto", 16)
FP8 = AttentionShape("FlashAttentionImpl", 24, 8, 128, 128, "bfloat16", "fp8", 16)
LENGTHS = (1024, 8192)


class Times:
    """Times made up by a function, and the sizes that were asked for."""

    def __init__(self, of: Mapping[Contender, float], lengths: tuple[int, ...] = LENGTHS):
        self.of, self.room = of, lengths
        self.seen: Mapping[str, float] = {"gpu_other_processes": 0, "gpu_sm_clock_mhz": 1980}
        self.asked: list[tuple[tuple[int, int], int]] = []

    def lengths(self, size: tuple[int, int]) -> tuple[int, ...]:
        return self.room

    def times(self, size: tuple[int, int], length: int) -> dict[Contender, list[float]]:
        self.asked.append((size, length))
        return {contender: [t] * 3 for contender, t in self.of.items()}

    def conditions(self) -> Mapping[str, float]:
        return self.seen


def decided(
    times: dict[Contender, list[float]], lengths: tuple[int, ...], commit: float = 0.0
) -> Choice:
    """The choice if every block takes as long as the other."""
    return decide({c: [[t] * 3 for t in ts] for c, ts in times.items()}, lengths, commit)


def timed_kind() -> AttentionKind:
    """Timed at three sizes: faster than stock at one length, at none, at both."""
    found, stock = kind(), [1, 1]
    ours = {(8, 5): [0.9, 1.1], (16, 5): [2, 2], (32, 5): [0.9, 0.9]}
    found.chosen = {
        size: decided({Contender.STOCK: stock, Contender.OURS: of_size}, LENGTHS)
        for size, of_size in ours.items()
    }
    return found


def kind(shape: AttentionShape = SHAPE, **more: Any) -> AttentionKind:
    return AttentionKind(shape, processors=132, **more)


def test_the_contender_that_loses_least_where_stock_may_take_over() -> None:
    """`merge` is 1 % faster at both lengths; `ours` gains 10 % at one, and stock has the other."""
    times = {
        Contender.STOCK: [10.0, 100.0],
        Contender.OURS: [9.0, 120.0],
        Contender.MERGE: [9.9, 99.0],
    }
    choice = decided(times, LENGTHS)
    assert choice.contender is Contender.OURS
    direct = direct_lengths([(28, choice)])
    assert direct.direct == (False, True)
    assert direct.sometimes
    assert not direct.always
    # The border is half-way in ratio: at the geometric mean of 1,024 and 8,192.
    lengths = (1, 1024, 2800, 3000, 8000, 8192, 10**6)
    assert [direct.at(n) for n in lengths] == [False] * 3 + [True] * 4


CLOCK = [1.0, 1.1, 1.2, 1.3, 1.4]


def scattered(by: float) -> list[float]:
    return [9.5 * (1 + by * n) for n in (-2, -1, 0, 1, 2)]


@pytest.mark.parametrize(
    ("stock", "ours", "commit", "direct"),
    [
        ([10.0] * 3, [10.0] * 3, 0.0, True),
        # A gain of less than 3 %: the engine's windows differ that much from those that were timed.
        ([10.0] * 3, [9.75] * 3, 0.0, True),
        ([10.0] * 3, [9.65] * 3, 0.0, False),
        # The commit counts.
        ([10.0] * 3, [9.6] * 3, 0.05, False),
        ([10.0] * 3, [9.6] * 3, 0.2, True),
        # 5 % in the median: blocks that differ by 0.5 % show it, blocks that differ by 5 % do not.
        ([10.0] * 5, scattered(0.005), 0.0, False),
        ([10.0] * 5, scattered(0.05), 0.0, True),
        # A clock that rises from block to block changes both: that is no scatter.
        ([10.0 + c for c in CLOCK], [9.5 + c for c in CLOCK], 0.0, False),
    ],
)
def test_what_is_always_left_to_stock(
    stock: list[float], ours: list[float], commit: float, direct: bool
) -> None:
    choice = decide({Contender.STOCK: [stock], Contender.OURS: [ours]}, (1024,), commit)
    assert direct_lengths([(1, choice)]).always is direct


def test_layers_of_several_shapes_win_or_lose_together() -> None:
    """One layer loses 5, four win 2 each, of 50."""
    losing = decided({Contender.STOCK: [10.0], Contender.OURS: [15.0]}, (1024,))
    winning = decided({Contender.STOCK: [10.0], Contender.OURS: [8.0]}, (1024,))
    assert direct_lengths([(1, losing), (4, winning)]).direct == (False,)
    assert direct_lengths([(1, losing), (2, winning)]).direct == (True,)


LATENT = AttentionShape("Mla", 16, 1, 576, 512, "bfloat16", "auto", 64, latent=True)
MERGES: dict[str, Any] = {"can_merge": True}


@pytest.mark.parametrize(
    ("of", "size", "timed", "expected"),
    [
        (kind(), (8, 5), None, Contender.OURS),  # sizes that were not timed: from the table
        (kind(), (64, 5), None, Contender.OURS_4),
        (kind(FP8), (8, 9), None, Contender.OURS_32),
        (kind(), (64, 9), None, Contender.OURS),
        (kind(LATENT), (64, 2), None, Contender.OURS),  # with few rows others have a tiling
        (kind(LATENT, **MERGES), (8, 5), None, Contender.MERGE),
        (kind(LATENT, **MERGES), (8, 5), Contender.OURS, Contender.OURS),
        (kind(LATENT, **MERGES, forced=Contender.OURS), (8, 5), None, Contender.OURS),
        (kind(**MERGES, forced=Contender.MERGE), (8, 5), None, Contender.MERGE),
        (kind(forced=Contender.MERGE), (8, 5), None, Contender.OURS),  # which it cannot
        (kind(forced=Contender.OURS), (8, 5), Contender.MERGE, Contender.OURS),
    ],
)
def test_what_attends_a_size(
    of: AttentionKind, size: tuple[int, int], timed: Contender | None, expected: Contender
) -> None:
    if timed is not None:
        of.chosen = {size: Choice(timed, (), (), (), ())}
    assert of.contender(size) is expected
    if timed is None:
        assert of.tiling(size) is (Contender.OURS if expected is Contender.MERGE else expected)


SLOWER = {Contender.STOCK: 1.0, Contender.OURS: 2.0}
FACTS = {"gpu": "a GPU / H200", "heads": 24}
WRONG_SIZE = json.dumps({"facts": {"version": ChoiceStore.VERSION, **FACTS}, "sizes": {"8x5": 3}})


@pytest.mark.parametrize(
    ("seen", "facts", "lengths", "text", "again"),
    [
        ({"gpu_throttle_reasons": 1.0, "gpu_temperature_c": 80.0}, FACTS, LENGTHS, None, 0),  # idle
        ({}, FACTS, LENGTHS, None, 0),  # no NVML
        # Times that were disturbed; the last by a software power cap.
        ({"gpu_other_processes": 1.0}, FACTS, LENGTHS, None, 2),
        ({"gpu_throttled_ms": 0.5}, FACTS, LENGTHS, None, 2),
        ({"gpu_throttle_reasons": 4.0}, FACTS, LENGTHS, None, 2),
        ({}, {**FACTS, "heads": 32}, LENGTHS, None, 2),
        # A larger cache, or another --max-model-len, has room for other contexts.
        ({}, FACTS, (512,), None, 2),
        # Files that cannot be read.
        *(({}, FACTS, LENGTHS, text, 2) for text in ("", "{", "[]", WRONG_SIZE)),
    ],
)
def test_stored_choices_are_read_again_or_timed_again(
    tmp_path: Path,
    seen: dict[str, float],
    facts: dict[str, object],
    lengths: tuple[int, ...],
    text: str | None,
    again: int,
) -> None:
    sizes, first, times = [(8, 5), (64, 5)], kind(), Times({**SLOWER, Contender.MERGE: 0.9})
    times.seen = seen
    assert first.choose(sizes, ChoiceStore(FACTS, tmp_path), times, 0.1) == 2
    assert len(times.asked) == 2 * len(LENGTHS)
    (file,) = tmp_path.iterdir()
    entry = json.loads(file.read_text())["sizes"]["64x5"]
    assert (entry["blocks"], entry["conditions"]) == (3, seen)
    if text is not None:
        file.write_text(text)
    times.seen, times.room = {"gpu_other_processes": 0.0}, lengths
    for timed in (again, 0):
        second = kind()
        assert second.choose(sizes, ChoiceStore(facts, tmp_path), times, 0.1) == timed
        assert second.contender((64, 5)) is Contender.MERGE
        assert again or second.chosen == first.chosen


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ChoiceStore({}, tmp_path / "file" / "below")
    assert kind().choose([(8, 5)], store, Times(SLOWER), 0.0) == 1


def test_neighbouring_sizes_share_a_measurement(tmp_path: Path) -> None:
    times = Times(SLOWER, (1024,))
    chosen = kind()
    sizes = [(n, 5) for n in (1, 2, 4, 8, 16, 20, 24, 60, 64)]
    chosen.choose(sizes, ChoiceStore({}, tmp_path), times, 0.0)
    asked = [size[0] for size, _ in times.asked]
    assert asked == [64, 24, 16, 8, 4, 2, 1]
    assert set(chosen.chosen) == set(sizes)


def test_a_contender_that_fails_at_one_length_is_left_out(tmp_path: Path) -> None:
    class Failing(Times):
        def times(self, size: tuple[int, int], length: int) -> dict[Contender, list[float]]:
            found = super().times(size, length)
            return {c: t for c, t in found.items() if c is not Contender.OURS or length < 8192}

    times = {Contender.STOCK: 10.0, Contender.OURS: 5.0, Contender.MERGE: 8.0}
    own = kind()
    assert own.choose([(8, 5)], ChoiceStore({"a": 1}, tmp_path), Failing(times), 0.0) == 1
    assert own.contender((8, 5)) is Contender.MERGE


def batch(*lengths: int) -> Any:
    bounds = torch.tensor([*lengths, 99999], dtype=torch.int32)
    return SimpleNamespace(num_reqs=len(lengths), seq_lens_cpu_upper_bound=bounds)


def test_why_a_step_is_left_to_stock() -> None:
    timed = timed_kind()
    choices = AttentionChoices([(timed, 28)])
    choices.settle([*timed.chosen, (64, 5)])
    assert choices.why_direct((8, 5), batch(1000, 1100)) is None
    assert choices.why_direct((8, 5), batch(1000, 15000)) == "slower_than_stock"
    assert choices.why_direct((16, 5), batch(1000)) == "slower_than_stock"
    assert choices.why_direct((32, 5), batch(8192)) is None
    assert choices.why_direct((64, 5), batch(8192)) is None  # it was not timed
    assert [choices.of(size).always for size in ((8, 5), (16, 5), (32, 5))] == [False, True, False]
    told = {"8x5": "ours; stock at 8192 tokens", "16x5": "stock", "32x5": "ours"}
    assert choices.in_words() == told
    times = {"context": [1024, 8192], "stock": [1e6, 1e6], "ours": [0.9e6, 1.1e6]}
    assert choices.times_us()["8x5"] == {"24/8x128": times}
    stock = AttentionChoices([(timed, 28)], stock_only=True)
    assert stock.why_direct((32, 5), batch(8192)) == "stock_attention"
    assert stock.of((32, 5)).always


def test_a_shape_that_was_not_timed_leaves_nothing_to_stock() -> None:
    timed, other = kind(), kind(FP8)
    timed.chosen = {(8, 5): decided({Contender.STOCK: [1], Contender.OURS: [2]}, (1024,))}
    choices = AttentionChoices([(timed, 14), (other, 14)])
    choices.settle([(8, 5)])
    assert choices.of((8, 5)) == NEVER == DirectLengths()


def test_other_ranks_take_the_firsts_choices() -> None:
    first, second = AttentionChoices([(kind(), 28)]), AttentionChoices([(kind(), 28)])
    first._kinds[0][0].chosen = {
        (8, 5): decided({Contender.STOCK: [1.0], Contender.MERGE: [2.0]}, (1024,))
    }
    for choices in (first, second):
        choices.take(first.given(), [(8, 5)])
        assert choices.of((8, 5)).always
        assert choices._kinds[0][0].contender((8, 5)) is Contender.MERGE


def test_a_gate_runs_both_forms_of_a_size_that_is_direct_at_some_contexts() -> None:
    """Whatever the contexts are; its first windows, which are checked by layer, are staged."""
    timed = timed_kind()
    choices = AttentionChoices([(timed, 28)])
    choices.settle(list(timed.chosen))

    def reasons(size: tuple[int, int], length: int) -> list[str | None]:
        steps = [batch(length) for _ in range(200)]
        twice = [{choices.why_direct(size, step) for _ in range(2)} for step in steps]
        return [reason for [reason] in twice]

    direct = "slower_than_stock"
    for length in (1000, 15000):
        choices.gate(True)  # each batch
        found = reasons((8, 5), length)
        assert found[:3] == [None] * 3
        assert 30 < found.count(direct) < 70
        for every in range(2, 6):  # interleaved cells: each has windows of both forms
            assert all(set(found[n::every]) == {None, direct} for n in range(every))
    assert reasons((16, 5), 1000) == [direct] * 200  # no graph of it exists
    assert reasons((32, 5), 15000) == [None] * 200
    choices.gate(False)
    assert reasons((8, 5), 1000) == [None] * 200
    assert reasons((8, 5), 15000) == [direct] * 200


def test_ranks_leave_the_same_windows_of_a_gate_to_stock() -> None:
    ranks = [AttentionChoices([(timed_kind(), 28)]) for _ in range(2)]
    for rank in ranks:
        rank.settle([(8, 5)])
        rank.gate(True)
    steps = [batch(1000) for _ in range(50)]
    first, second = ([rank.why_direct((8, 5), step) for step in steps] for rank in ranks)
    assert first == second
    assert len(set(first)) == 2
