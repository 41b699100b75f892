"""A stand-in for vLLM: answers from a hash, counts as vLLM would, and fails if a test asks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Self

from nwor_bench.engine.protocol import BatchOutput, GreedyOutput, Kept, KeptPair, Sampling, Span
from nwor_bench.engine.readings import VllmCounters
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.records.cell import INTERLEAVED
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Cell, NworMode, RequestTimes, ScvMode, WindowRecord
from nwor_bench.records.window_order import WindowOrder
from nwor_bench.workload.config import RunSpec

LAYERS = 3
BYTES_PER_TOKEN = 1536
DRAFTS = 4
WINDOWS = 3
INTERLEAVED_WINDOWS = 60
"""An interleaved batch runs on behind its requests' ends: vLLM counts its first WINDOWS windows."""

OWN_ERROR = 0.01
"""Error of rows of mode off against itself."""

Tokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Call:
    """One `generate`: what the sweep asked for."""

    cell: Cell
    prompts: Tokens
    sampling: Sampling


@dataclass(frozen=True)
class Flip:
    """In mode stage `token` follows a prefix; mode off puts it `gap` nats behind its own."""

    token: int
    gap: float


@dataclass
class FakeKvCache:
    """K/V rows without values: mode off is off by OWN_ERROR from itself, and a wrong row by 1.

    Args:
        wrong: says in which cells V of head 1 in layer 1 is wrong.
        by: error of such a row beside rows that are alike.
        unreadable: why no rows can be kept.
        lost: all positions of a cell are in blocks that other requests have.
        own: error of mode off against itself in each layer.
    """

    wrong: Callable[[Cell], bool] = lambda cell: False
    by: float = 1.0
    unreadable: str | None = None
    lost: bool = False
    own: Sequence[float] = (OWN_ERROR,) * LAYERS
    cell: Cell | None = None
    watched: list[bool] = field(default_factory=list)
    prefills: list[tuple[Cell | None, Tokens]] = field(default_factory=list)
    nudged: list[Tokens] = field(default_factory=list)
    kept: dict[str, tuple[Cell | None, tuple[Span, ...]]] = field(default_factory=dict)

    def watch(self, on: bool) -> None:
        self.watched.append(on)

    def prefill(
        self, sequences: Sequence[Sequence[int]], *, nudged: bool = False, outputs: int = 1
    ) -> None:
        ids = tuple(tuple(each) for each in sequences)
        if nudged:
            self.nudged.append(ids)
        else:
            self.prefills.append((self.cell, ids))

    @property
    def rows(self) -> Self:
        return self

    def keep(self, name: str, spans: Sequence[Span] = ()) -> Kept:
        self.kept[name] = (self.cell, tuple(spans))
        return Kept(self.unreadable)

    def compare(self, name: str, pairs: Sequence[KeptPair]) -> list[dict[str, Any]]:
        cell, spans = self.kept[name]
        for i, other, j, _ in pairs:
            assert self.kept[other][1][j] == spans[i]
        positions = sum(stop - start for start, stop in spans)
        wrong = name == "cell" and cell is not None and self.wrong(cell)
        alike = any(other == "off" for _, other, _, _ in pairs)
        errors = [
            _kv_error(
                layer,
                what,
                self.by if wrong and (layer, what) == (1, "V") else None,
                0.0 if alike else self.own[layer],
            )
            for layer in range(LAYERS)
            for what in "KV"
        ]
        checked = 0 if self.lost else positions
        return [{"checked": checked, "unknown": positions - checked, "errors": errors}]

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            del self.kept[name]


def _kv_error(layer: int, what: str, wrong: float | None, usual: float) -> dict[str, Any]:
    error = usual if wrong is None else max(wrong, usual)
    place = {"request": 1, "position": 5, "head": 1}
    return {
        "layer": layer, "name": f"layers.{layer}", "what": what, "part": "output", "rows": 1000,
        "largest": error, "rms": usual / 2, "median": usual / 4, "place": place,
        "differing": int(error > 0), "first": place if error else None,
        "one_step": 1e-4, "one_element": 1e-5,
    }  # fmt: skip


@dataclass
class FakeEngine:
    """A greedy token depends on those before it, sampled ones on prompt, seed and place.

    Args:
        wrong: says which calls (number, cell) answer with one token changed.
        failing: what to raise in which call, by its number from 0.
        before: called at the start of every `generate` with the call's number.
        bytes_per_token, device, dtype, experts: as `status` tells it.
        scv_fallback: why no window is validated as an SCV mode asks.
        direct: why mode stage stages no window; None if it does.
        flips: by prefix (prompt and output so far), what mode stage answers otherwise.
        error: nats by which mode off's gaps move between batch shapes.
        decoded: cell, prompts and lengths of each `decode_greedily`.
        switched: counters, with the number of calls before it.
        kv: its KV cache.
    """

    wrong: Callable[[int, Cell], bool] = lambda number, cell: False
    failing: dict[int, BaseException] = field(default_factory=dict)
    before: Callable[[int], None] = lambda number: None
    bytes_per_token: int | None = BYTES_PER_TOKEN
    scv_fallback: str = "capture_not_supported"
    direct: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    experts: int = 0
    flips: dict[tuple[int, ...], Flip] = field(default_factory=dict)
    error: float = 0.05
    decoded: list[tuple[Cell, Tokens, tuple[int, ...]]] = field(default_factory=list)
    switched: list[tuple[int, str, bool]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    closed: int = 0
    cell: Cell | None = None
    order: WindowOrder | None = None
    checking: bool = False
    kv: FakeKvCache = field(default_factory=FakeKvCache)

    def status(self) -> EngineStatus:
        return EngineStatus(
            device=self.device,
            dtype=self.dtype,
            experts=self.experts,
            attention_backend="CPU_ATTN",
            runner="V1",
            target_layers=LAYERS,
            drafter_layers=0,
            bytes_per_token=self.bytes_per_token,
            block_size=32,
            num_gpu_blocks=64,
            start_count=1,
            start_seconds=0.5,
        )

    def set_modes(self, cell: Cell) -> None:
        self.cell = self.kv.cell = cell

    def kv_cache(self) -> FakeKvCache:
        return self.kv

    def set_counters(self, on: bool) -> None:
        self.switched.append((len(self.calls), "counters", on))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keep_prefix_cache: bool = False,
    ) -> BatchOutput:
        assert self.cell is not None, "no mode was set"
        number = len(self.calls)
        asked = tuple(tuple(prompt) for prompt in prompts)
        self.calls.append(Call(self.cell, asked, sampling))
        self.before(number)
        if number in self.failing:
            raise self.failing[number]
        if sampling.temperature == 0:
            tokens = [self._greedy(prompt, sampling.max_new_tokens) for prompt in asked]
        else:
            tokens = [_sampled(prompt, place, sampling) for place, prompt in enumerate(asked)]
        if self.wrong(number, self.cell):
            last = tokens[-1]
            tokens[-1] = (*last[:-1], last[-1] + 1)
        windows = self._windows(asked)
        return BatchOutput(
            token_ids=tuple(tokens),
            latency_ms=100.0 + Random(str((asked, self.cell.label))).random(),
            windows=windows,
            counters=_counters(windows),
            scv_counters=_scv_counters(self.cell, len(windows)),
            request_times=RequestTimes((8.0,) * len(asked), (2.5,) * len(asked)),
        )

    def interleave(self, order: WindowOrder) -> None:
        self.order = order
        self.cell = self.kv.cell = replace(order.cells[0], arm=INTERLEAVED)

    def stop_interleaving(self) -> list[dict[str, dict[str, int]]]:
        assert self.order is not None
        cells, self.order = self.order.cells, None
        return [{"scv_counters": {}, "scv_fallbacks": {}} for _ in cells]

    def _windows(self, asked: Tokens) -> list[WindowRecord]:
        assert self.cell is not None
        if self.order is None:
            return [self._window(self.cell, asked, step) for step in range(WINDOWS)]
        places = list(islice(self.order.places(), INTERLEAVED_WINDOWS))
        cells = self.order.cells
        return [
            replace(
                self._window(cells[place.cell], asked, step, step < WINDOWS),
                wall_ms=10.0 + 0.1 * step,  # a drift that A B B A cancels to well below 1 %
                cell_number=place.cell,
                group=place.group,
                run=place.run,
                run_length=place.run_length,
                position=place.position,
            )
            for step, place in enumerate(places)
        ]

    def _window(self, cell: Cell, asked: Tokens, step: int, counted: bool = True) -> WindowRecord:
        window = _window(cell, asked, step, self.scv_fallback, counted)
        window = replace(window, path=self.path_of(cell, step))
        if self.direct is None or cell.nwor_mode is not NworMode.STAGE:
            return window
        counts = ("staged_tokens", "committed_tokens", "rejected_tokens", "stage_operations")
        return replace(window, **dict.fromkeys(counts, 0), fallback_reason=self.direct)

    def watch_writes(self, on: bool) -> list[dict[str, int]]:
        return []

    def check_layers(self, requests: int | None) -> list[list[dict[str, Any]]]:
        self.checking = requests is not None
        layers = [{"layer": f"layers.{number}", "written": 8} for number in range(LAYERS)]
        facts = {"path": "eager", "rejected": 1, "seconds": 0.0, "whole_caches": 0}
        return [[{**facts, "layers": layers}]]

    def path_of(self, cell: Cell, step: int) -> str | None:
        """Path under full graphs: a checked window is never ready, nor is the first one."""
        if cell.nwor_mode is NworMode.OFF:
            return None
        if cell.nwor_mode is NworMode.CONTROL:
            return "full graph, ours"
        again = "joined" if self.checking or not step else "ready"
        of_mode = {ScvMode.OFF: "host", ScvMode.GRAPH: "validated", ScvMode.ADAPTIVE: again}
        return f"full graph, ours, {of_mode[cell.scv_mode]}"

    def decode_greedily(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        ignore_eos: bool,
        top: int = 0,
        keep_prefix_cache: bool = False,
        nudged: bool = False,
    ) -> list[GreedyOutput]:
        assert self.cell is not None, "no mode was set"
        asked = tuple(tuple(prompt) for prompt in prompts)
        self.decoded.append((self.cell, asked, tuple(max_new_tokens)))
        shape = (len(asked), keep_prefix_cache, max(max_new_tokens), nudged)
        outputs = []
        for prompt, length in zip(asked, max_new_tokens, strict=True):
            tokens = self._greedy(prompt, length)
            tops = [self._top((*prompt, *tokens[:at]), shape) for at in range(length if top else 0)]
            outputs.append(GreedyOutput(tokens, tuple(tops)))
        return outputs

    def _greedy(self, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
        ids = prompt
        while len(ids) < len(prompt) + length:
            stage = self.cell is not None and self.cell.nwor_mode is NworMode.STAGE
            flip = self.flips.get(ids) if stage else None
            ids = (*ids, greedy_token(ids) if flip is None else flip.token)
        return ids[len(prompt) :]

    def _top(self, ids: tuple[int, ...], shape: tuple[Any, ...]) -> dict[int, float]:
        """The greedy token, and two tokens behind it whose gaps move with the shape."""
        moved = Random(str((ids, shape))).gauss(0, self.error)
        first = greedy_token(ids)
        found = {first: -0.1, (first + 1) % 256: -4.1 - moved}
        if ids in self.flips:
            found[self.flips[ids].token] = -0.1 - self.flips[ids].gap - moved
        return found

    def close(self) -> None:
        self.closed += 1


@dataclass
class FakeFactory:
    """What `run_one` takes in place of VllmEngine; keeps the engine for the test."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    starts: int = 0

    def __call__(self, pair: ResolvedPair, spec: RunSpec, log: Path | None = None) -> FakeEngine:
        self.starts += 1
        return self.engine


def accept_arguments(pair: ResolvedPair, spec: RunSpec) -> None:
    """In place of vLLM's own check of its arguments."""


GATE_EVENTS = ("kv_gate", "local_gate", "parity_sums")


def events_but_gates(run: RunData) -> list[dict[str, Any]]:
    """A run's events without those that every gate writes."""
    return [event for event in run.events if event.get("event") not in GATE_EVENTS]


def greedy_token(ids: tuple[int, ...]) -> int:
    """What mode off says behind these tokens."""
    return Random(str(ids)).randrange(256)


def _sampled(prompt: tuple[int, ...], place: int, sampling: Sampling) -> tuple[int, ...]:
    random = Random(str((prompt, place, sampling.seed)))
    return tuple(random.randrange(256) for _ in range(sampling.max_new_tokens))


def _window(
    cell: Cell, prompts: Tokens, step: int, scv_fallback: str, counted: bool = True
) -> WindowRecord:
    random = Random(str((prompts, step)))
    accepted = [random.randint(0, DRAFTS) for _ in prompts]
    drafts = DRAFTS * len(prompts)
    staged = drafts if cell.nwor_mode is NworMode.STAGE else 0
    committed = sum(accepted) if staged else 0
    return WindowRecord(
        num_reqs=len(prompts),
        draft_tokens=drafts,
        accepted_tokens=sum(accepted),
        staged_tokens=staged,
        committed_tokens=committed,
        rejected_tokens=staged - committed,
        stage_operations=staged * LAYERS,
        fallback_reason=None,
        wall_ms=10.0 + step,
        forward_ms=8.0,
        sample_ms=1.0,
        mask_ms=None,
        commit_ms=0.5 if staged else None,
        uncounted_draft_tokens=0 if counted else drafts,
        uncounted_accepted_tokens=0 if counted else sum(accepted),
        accepted_per_position=tuple(counted * sum(a > j for a in accepted) for j in range(DRAFTS)),
        drafts_per_position=(counted * len(prompts),) * DRAFTS,
        scv_path="host" if cell.scv_mode is ScvMode.OFF else "eager",
        scv_fallback_reason=None if cell.scv_mode is ScvMode.OFF else scv_fallback,
    )


def _counters(windows: list[WindowRecord]) -> VllmCounters:
    columns = zip(*(window.accepted_per_position for window in windows), strict=True)
    return VllmCounters(
        num_drafts=sum(window.drafts_per_position[0] for window in windows),
        draft_tokens=sum(sum(window.drafts_per_position) for window in windows),
        accepted_tokens=sum(sum(window.accepted_per_position) for window in windows),
        accepted_per_position=tuple(map(sum, columns)),
    )


def _scv_counters(cell: Cell, windows: int) -> dict[str, int]:
    on = windows if cell.scv_mode is not ScvMode.OFF else 0
    return {
        "scv_device_validations": on,
        "scv_graph_hits": 0,
        "scv_graph_captures": 0,
        "scv_fallback_count": on,
    }
