"""K/V rows read back from a simulated cache: whatever the scheduler does with blocks meanwhile."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.errors import BenchError
from nwor_bench.plugin.observe.errors import RowErrors, RowPlaces
from nwor_bench.plugin.observe.kv_rows import KvRows

SIZE = 4
HEADS = 2
K_WIDTH, V_WIDTH = 3, 2
LAYERS = ("layers.0", "layers.1")


class Runner:
    """A runner whose cache has one K/V value a layer, head and element for each token.

    Kernel blocks are half as long as the scheduler's.
    """

    def __init__(self, blocks: int):
        shape = (blocks * 2, HEADS, SIZE // 2, K_WIDTH + V_WIDTH)
        facts: dict[str, Any] = {"head_size": K_WIDTH, "kv_cache_dtype": "auto"}
        layers = {name: SimpleNamespace(kv_cache=torch.zeros(shape), **facts) for name in LAYERS}
        self.compilation_config = SimpleNamespace(static_forward_context=layers)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group_of(*LAYERS)])
        self.steps = 0

    def execute_model(self, scheduler_output: Any) -> None:
        """Write what the step says: (block, offset, number of the token)."""
        self.steps += 1
        for block, offset, token in getattr(scheduler_output, "writes", ()):
            self.write(block * SIZE + offset, token)

    def cache(self, layer: int) -> torch.Tensor:
        cache: torch.Tensor = self.compilation_config.static_forward_context[LAYERS[layer]].kv_cache
        return cache

    def write(self, slot: int, token: int, layers: Iterable[int] = range(len(LAYERS))) -> None:
        half = SIZE // 2
        for number in layers:
            self.cache(number)[slot // half, :, slot % half] = rows_of(token)[number]


def group_of(*names: str) -> Any:
    return SimpleNamespace(layer_names=names, kv_cache_spec=SimpleNamespace(block_size=SIZE))


def rows_of(token: int) -> torch.Tensor:
    """What every layer, head and element of a token holds: [layers, heads, K + V width]."""
    shape = (len(LAYERS), HEADS, K_WIDTH + V_WIDTH)
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape) + 1000.0 * token


@dataclass
class Request:
    """A simulated request: its blocks, and the tokens that they hold."""

    name: str
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    state: str = "waiting"


def new_of(name: str, blocks: list[int], computed: int = 0) -> Any:
    """vLLM's NewRequestData."""
    return SimpleNamespace(req_id=name, block_ids=(list(blocks),), num_computed_tokens=computed)


def output_of(*new: Any, finished: Iterable[str] = (), writes: Iterable[Any] = ()) -> Any:
    """vLLM's SchedulerOutput, and what the model will write."""
    cached: dict[str, Any] = {"req_ids": [], "new_block_ids": [], "num_computed_tokens": []}
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(**cached, resumed_req_ids=set()),
        finished_req_ids=set(finished),
        writes=list(writes),
    )


class Scheduler:
    """Gives blocks to requests as vLLM does, in a random order: admit, grow, preempt, finish."""

    def __init__(self, blocks: int, random: Random):
        self.free = list(range(1, blocks))  # block 0 is vLLM's null block
        self.random = random
        self.requests: list[Request] = []
        self.finished: set[str] = set()
        self._tokens = 0

    def step(self) -> Any:
        """One scheduler output; `writes` is what the model will put where."""
        output = output_of(finished=self.finished)
        self.finished.clear()
        for request in [r for r in self.requests if r.state == "running"]:
            self._advance(request, output)
        for request in [r for r in self.requests if r.state == "preempted"]:
            if self.random.random() < 0.5:
                self._resume(request, output)
        if self.random.random() < 0.6:
            self._admit(output)
        return output

    def end(self) -> None:
        """Requests that end behind the last step."""
        for request in self.requests:
            if request.state == "running" and self.random.random() < 0.3:
                self._free(request, "finished")
                self.finished.add(f"{request.name}-x")

    def _advance(self, request: Request, output: Any) -> None:
        if self.random.random() < 0.15:
            self._free(request, "preempted")
            return
        new = self._new_tokens(self.random.randint(1, 3))
        blocks = self._grow(request, len(request.tokens) + len(new))
        if blocks is None:
            return
        self._write(request, len(request.tokens), new, output)
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(f"{request.name}-x")
        cached.new_block_ids.append((blocks,) if blocks else None)
        cached.num_computed_tokens.append(len(request.tokens) - len(new))

    def _admit(self, output: Any) -> None:
        request = Request(f"r{len(self.requests)}")
        donors = [r for r in self.requests if r.state == "running" and len(r.tokens) > SIZE]
        hits = 0
        if donors and self.random.random() < 0.5:
            donor = self.random.choice(donors)
            hits = self.random.randint(1, (len(donor.tokens) - 1) // SIZE)
            request.blocks = donor.blocks[:hits]
            request.tokens = donor.tokens[: hits * SIZE]
        new = self._new_tokens(self.random.randint(1, 2 * SIZE))
        if self._grow(request, len(request.tokens) + len(new)) is None:
            return
        self._write(request, hits * SIZE, new, output)
        self.requests.append(request)
        request.state = "running"
        output.scheduled_new_reqs.append(new_of(f"{request.name}-x", request.blocks, hits * SIZE))

    def _resume(self, request: Request, output: Any) -> None:
        """All of its tokens are computed anew, in other blocks; as V1 tells it, or as V2."""
        request.blocks, tokens = [], request.tokens
        if self._grow(request, len(tokens)) is None:
            return
        request.tokens = []
        self._write(request, 0, tokens, output)
        request.state = "running"
        name, blocks = f"{request.name}-x", (list(request.blocks),)
        if self.random.random() < 0.5:
            output.scheduled_new_reqs.append(new_of(name, *blocks))
            return
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(name)
        cached.resumed_req_ids.add(name)
        cached.new_block_ids.append(blocks)
        cached.num_computed_tokens.append(0)

    def _new_tokens(self, count: int) -> list[int]:
        self._tokens += count
        return list(range(self._tokens - count, self._tokens))

    def _write(self, request: Request, start: int, tokens: list[int], output: Any) -> None:
        request.tokens = [*request.tokens[:start], *tokens]
        for position, token in enumerate(tokens, start=start):
            block = request.blocks[position // SIZE]
            output.writes.append((block, position % SIZE, token))

    def _grow(self, request: Request, length: int) -> list[int] | None:
        """Blocks on top for so many tokens; None if there are not enough."""
        needed = -(-length // SIZE) - len(request.blocks)
        if needed > len(self.free):
            return None
        blocks = [self.free.pop(0) for _ in range(needed)]
        request.blocks = request.blocks + blocks
        return blocks

    def _free(self, request: Request, state: str) -> None:
        """Blocks that no other request holds go back, to the front or to the end."""
        request.state = state
        others = {b for r in self.requests if r.state == "running" for b in r.blocks}
        back = [block for block in request.blocks if block not in others]
        if self.random.random() < 0.7:
            self.free = back + self.free
        else:
            self.free += back


@pytest.mark.slow
@given(st.randoms(use_true_random=False), st.integers(6, 20), st.integers(1, 40))
def test_every_row_of_a_finished_request_is_what_was_written(
    random: Random, blocks: int, steps: int
) -> None:
    runner = Runner(blocks)
    rows = watched(runner)
    scheduler = Scheduler(blocks, random)
    for _ in range(steps):
        runner.execute_model(scheduler.step())
        scheduler.end()
    assert runner.steps == steps
    done = [r for r in scheduler.requests if r.state == "finished"]
    spans = [(0, len(request.tokens)) for request in done]
    assert rows.keep("now", [r.name for r in done], spans)["unreadable"] is None
    kept = rows._groups[0]._kept["now"]
    tokens = [token for request in done for token in request.tokens]
    assert kept.known.tolist() == [True] * len(tokens)  # none was lost without a copy
    for number, layer in enumerate(kept.tensors):
        expected = [rows_of(token)[number] for token in tokens]
        assert torch.equal(layer, torch.stack(expected) if expected else layer[:0])


def watched(runner: Runner) -> KvRows:
    rows = KvRows(SimpleNamespace(runner=runner, target_layers=list(LAYERS)))  # type: ignore[arg-type]
    rows.watch(True)
    return rows


def test_rows_beyond_the_room_for_copies_are_said_to_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nwor_bench.plugin.observe import kv_rows

    monkeypatch.setattr(kv_rows, "RESCUE_BYTES", 0)
    runner = Runner(8)
    rows = watched(runner)
    runner.execute_model(output_of(new_of("a-x", [1, 2])))
    runner.execute_model(output_of(new_of("b-x", [2]), finished=["a-x"]))
    rows.keep("now", ["a", "b"], [(0, 8), (0, 4)])
    assert rows._groups[0]._kept["now"].known.tolist() == [True] * 4 + [False] * 4 + [True] * 4
    found = rows.compare("now", [(0, "now", 0, 3), (1, "now", 1, 4)])
    assert (found["checked"], found["unknown"]) == (8, 4)
    assert {(e["part"], e["rows"]) for e in found["errors"]} == {("prompt", 14), ("output", 2)}


def test_the_null_block_and_positions_without_a_block_are_not_known() -> None:
    runner = Runner(8)
    rows = watched(runner)
    runner.execute_model(output_of(new_of("a-x", [0, 2])))
    rows.keep("now", ["a", "nobody"], [(0, 10), (0, 2)])
    assert rows._groups[0]._kept["now"].known.tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_nothing_is_wrapped_and_nothing_is_kept_once_it_is_off() -> None:
    runner = Runner(8)
    rows = watched(runner)
    assert "execute_model" in vars(runner)
    rows.watch(True)  # before the next batch
    rows.keep("now", [], [])
    for name, other in (("now", "off"), ("off", "now")):
        with pytest.raises(BenchError, match="compared with rows that are not kept"):
            rows.compare(name, [(0, other, 0, 0)])
    rows.watch(False)
    assert "execute_model" not in vars(runner)
    assert rows._groups[0]._kept == rows._groups[0]._rescued == {}
    rows.watch(False)


def test_each_layer_is_read_from_the_blocks_of_its_own_group() -> None:
    """A request has other blocks in each group; one of a sliding window's is given away early."""
    runner = Runner(8)
    groups = [group_of(LAYERS[1]), group_of("a drafter's"), group_of(LAYERS[0])]
    runner.kv_cache_config.kv_cache_groups = groups
    rows = watched(runner)
    new, early = new_of("a-x", []), new_of("b-x", [])
    new.block_ids = ([1, 2], [3, 4], [5, 6])
    early.block_ids = ([5], [7], [1])  # both groups share one pool of blocks
    runner.execute_model(output_of(new))
    for number, first in ((1, 1), (0, 5)):
        for position in range(8):
            runner.write(first * SIZE + position, position, [number])
    runner.execute_model(output_of(early))
    for number in range(2):
        runner.cache(number)[[2, 3, 10, 11]] = torch.nan
    assert rows.keep("now", ["a"], [(0, 8)])["unreadable"] is None
    row_bytes = sum(group._row_bytes() for group in rows._groups.values())
    assert row_bytes == 2 * HEADS * (K_WIDTH + V_WIDTH) * 4
    for group, number in ((0, 1), (2, 0)):
        kept = rows._groups[group]._kept["now"]
        assert kept.known.all()
        expected = torch.stack([rows_of(position)[number] for position in range(8)])
        assert torch.equal(kept.tensors[0], expected)
    found = rows.compare("now", [(0, "now", 0, 4)])
    assert (found["checked"], found["unknown"]) == (8, 0)
    assert [entry["layer"] for entry in found["errors"]] == [0] * 4 + [1] * 4
    assert {(entry["layer"], entry["name"]) for entry in found["errors"]} == set(enumerate(LAYERS))


def test_a_recurrent_layer_cannot_be_read() -> None:
    runner = Runner(4)
    layer = SimpleNamespace(kv_cache=(torch.zeros(2), torch.zeros(2)))
    runner.compilation_config.static_forward_context["layers.1"] = layer
    rows = watched(runner)
    assert rows.keep("now", [], [])["unreadable"].startswith("layers.1 has no cache of blocks")


# Errors of rows.


@pytest.mark.parametrize("what", ["K", "V"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("head", [0, 1])
def test_one_changed_value_is_named_exactly(what: str, layer: int, head: int) -> None:
    runner = Runner(8)
    rows = watched(runner)
    for name, block in (("a-x", 1), ("b-x", 3)):
        writes = [(block + p // SIZE, p % SIZE, p) for p in range(7)]
        runner.execute_model(output_of(new_of(name, [block, block + 1]), writes=writes))
    rows.keep("off", ["a", "b"], [(1, 7), (2, 7)])
    slot = 3 * SIZE + 5
    column = 1 if what == "K" else K_WIDTH
    runner.cache(layer)[slot // 2, head, slot % 2, column] += 0.5
    rows.keep("cell", ["a", "b"], [(0, 7), (0, 7)])
    found = rows.compare("cell", [(0, "off", 0, 4), (1, "off", 1, 4)])
    assert found["checked"] == 6 + 5
    (wrong,) = [entry for entry in found["errors"] if entry["differing"]]
    place = {"request": 1, "position": 5, "head": head}
    assert (wrong["layer"], wrong["what"], wrong["part"]) == (layer, what, "output")
    assert wrong["first"] == wrong["place"] == place
    assert wrong["differing"] == 1
    columns = slice(0, K_WIDTH) if what == "K" else slice(K_WIDTH, None)
    tokens = [*range(1, 7), *range(2, 7)]
    all_rows = torch.stack([rows_of(token)[layer][:, columns] for token in tokens])
    norm = all_rows.norm(dim=-1).square().mean().sqrt()
    assert wrong["largest"] == pytest.approx(0.5 / float(norm), rel=1e-3)


def places_of(rows: int) -> RowPlaces:
    numbers = torch.arange(rows)
    return RowPlaces(torch.zeros_like(numbers), numbers, torch.ones(rows, dtype=torch.bool))


def errors_of(
    rows: torch.Tensor, reference: torch.Tensor, places: RowPlaces, cache_dtype: str
) -> list[dict[str, Any]]:
    errors = RowErrors(places)
    errors.add({}, rows, reference, cache_dtype)
    return errors.read()


@pytest.mark.parametrize(
    ("dtype", "name", "step"),
    [
        (torch.bfloat16, "auto", 2**-7),
        (torch.float8_e4m3fn, "fp8", 2**-3),
        (torch.float8_e5m2, "fp8_e5m2", 2**-2),
    ],
)
def test_elements_are_read_in_the_cache_s_own_type(
    dtype: torch.dtype, name: str, step: float
) -> None:
    rows = torch.full((4, 1, 16), 2.0).to(dtype)
    other = rows.clone()
    other[2, 0, 3] = 2.0 * (1 + step)  # one rounding step
    if dtype.itemsize == 1:
        rows, other = rows.view(torch.uint8), other.view(torch.uint8)
    (found,) = errors_of(other, rows, places_of(4), name)
    assert found["differing"] == 1
    assert found["largest"] == pytest.approx(step / 16**0.5)
    assert found["one_step"] == pytest.approx(step / 16**0.5)
    assert found["one_element"] == pytest.approx(step / 16**0.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_have_no_error_but_a_place(bad: float) -> None:
    rows = torch.ones(5, 2, 4)
    other = rows.clone()
    other[3, 1, 0] = bad
    (found,) = errors_of(other, rows, places_of(5), "auto")
    assert found["largest"] is None
    assert found["place"] == found["first"] == {"request": 0, "position": 3, "head": 1}
    (own,) = errors_of(other, other, places_of(5), "auto")  # equal bits are no excuse
    assert own["largest"] is None


def test_errors_of_each_row_are_kept_if_rows_are_of_different_requests() -> None:
    reference = torch.ones(2, 3, 4)
    rows = reference.clone()
    rows[1, 2] = 3.0  # a row's norm is 2, and the distance 4
    numbers = torch.arange(2)
    each = RowPlaces(numbers, numbers, torch.ones(2, dtype=torch.bool))
    (entry,) = errors_of(rows, reference, each, "auto")
    assert entry["each"] == [[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]]
    (entry,) = errors_of(rows, reference, places_of(2), "auto")
    assert "each" not in entry


def test_layers_of_zeros_are_equal_to_each_other() -> None:
    zeros = torch.zeros(3, 1, 4)
    (found,) = errors_of(zeros, zeros, places_of(3), "auto")
    assert (found["largest"], found["rms"], found["differing"]) == (0.0, 0.0, 0)
    (found,) = errors_of(zeros + 1, zeros, places_of(3), "auto")
    assert found["largest"] is None
