"""run.json: a run's configuration, environment and outcome.

A damaged or edited part is refused by its name. A part may be missing or null (older versions,
engines that never started), but not have another type. Resuming a run needs more parts of the
header than reading it.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from nwor_bench.errors import StoreError
from nwor_bench.records.cell import NworMode, ScvMode
from nwor_bench.records.facts import EngineStatus, Environment, JsonPart
from nwor_bench.records.files import parse_json
from nwor_bench.records.types import (
    FORMAT_VERSION,
    AttentionBy,
    Interleave,
    RunStatus,
    StageBy,
)

WARM_UP, GATE, WHOLE, INTERLEAVED = "warm-up", "gate", "whole batches", "interleaved batches"
"""Parts of a run's time."""

_PARTS = ("pair", "spec", "engine", "environment", "parity", "warmup", "gate", "kv_gate")
"""Parts of the header that are empty before they are known."""


class PairFacts(JsonPart):
    """The models that ran; see `models.pairs.ResolvedPair`."""

    name: str | None = None
    """The pair's name."""
    method: str | None = None
    """vLLM's speculative method."""
    target: str | None = None
    """The target's folder or hub name."""
    draft: str | None = None
    """The drafter's folder or hub name; None if the method takes none."""
    dtype: str | None = None
    """Data type if the spec names none: the pair file's, or float32 if bf16 is slow here."""
    speculative: Mapping[str, Any] | None = None
    """Further settings of vLLM's speculative_config."""
    description: str | None = None
    """The pair file's sentence on it."""
    load_format: str | None = None
    """vLLM's; "dummy" for random weights."""
    arms: Mapping[str, "PairFacts"] = {}
    """The same target with other ways to draft, by the name of the arm; see `RunSpec.arms`."""


class BlockEntry(JsonPart):
    """One planned block."""

    block: int | None = None
    """The block's number; 0 is the gate's."""
    order: tuple[str, ...] | None = None
    """Labels of the cells, in the order in which they run."""
    prompt_ids: tuple[str, ...] | None = None
    """The prompts that every cell gets."""


class WarmupFacts(JsonPart):
    """How warm-up ended."""

    batches: int | None = None
    """Batches of off x off that it took."""
    lookback: int | None = None
    """Latest batches whose times must be steady."""
    not_steady: str | None = None
    """Why window times were not steady at its end; None if they were."""


class ParityFacts(JsonPart):
    """The gate's comparison and its result."""

    rule: str | None = None
    """What cells must share with off x off; see `ParityRule`."""
    compared: str | None = None
    """The rule in words."""
    ties: Mapping[str, Any] | None = None
    """Checks of differing tokens; None if there were none."""
    broken: Mapping[str, str] | None = None
    """First mismatch of each broken cell, by its label."""


class GateFacts(JsonPart):
    """How large the gate's batches were; a timed run cuts prompts to keep its time for windows."""

    requests: int | None = None
    """Requests of a batch."""
    whole: int | None = None
    """Requests with a whole prompt; the others' are cut."""
    prompt_tokens: int | None = None
    """Prompt tokens of a batch."""
    longest_prompt: int | None = None
    """Tokens of its longest prompt, which is whole."""
    new_tokens: int | None = None
    """Tokens that each request generates."""
    most_prompt_tokens: int | None = None
    """Prompt tokens that a batch was allowed; None if nothing was cut on purpose."""
    forecast_s: float | None = None
    """Seconds that the gate was to take, by the last warm-up batch."""
    room_s: float | None = None
    """Seconds that the budget left it."""


class KvGateFacts(JsonPart):
    """The comparison of staging cells' KV cache with mode off's, and its cost."""

    multiples: Mapping[str, float] | None = None
    """Largest allowed error of a cell in multiples of mode off's own, by kind of error."""
    budget_bytes: int | None = None
    """Most memory for kept rows on each rank."""
    seconds: float | None = None
    """Time that comparing took."""
    gate_seconds: float | None = None
    """Time that the whole gate took."""
    own_errors: Mapping[str, Mapping[str, float]] | None = None
    """Mode off against itself: the smallest and largest of a layer, by kind of error."""
    cells: Mapping[str, Mapping[str, Any]] | None = None
    """Result of each cell, by its label; see `KvResult`."""


class StoredSpec(JsonPart):
    """What is read of a run's configuration, see `RunSpec`; a field that older versions lack has
    the value that they ran with."""

    scenario: Mapping[str, Any] | None = None
    nwor_modes: tuple[NworMode, ...] = (NworMode.OFF, NworMode.STAGE)
    scv_modes: tuple[ScvMode, ...] = tuple(ScvMode)
    draft_counts: tuple[int, ...] | None = None
    engines: bool = False
    arms: Mapping[str, Mapping[str, Any]] | None = None
    engines_at_once: str | None = None
    against: Mapping[str, Any] | None = None
    stage_by: str = StageBy.REFERENCE
    attention: str = AttentionBy.AUTO
    interleave: Interleave | None = Interleave.BATCHES
    time_budget_s: float | None = None
    counters: str | None = None
    dtype: str | None = None
    speculative_config: Mapping[str, Any] | None = None
    engine_args: Mapping[str, Any] = {}


class RunHeader(JsonPart):
    """run.json. A part that it lacks, or has as null, is empty here."""

    format_version: int = FORMAT_VERSION
    """Version of run.json and records.jsonl."""
    status: RunStatus | None = None
    """How the run ended; partial while it runs."""
    scenario: Mapping[str, Any] | None = None
    """The scenario with the command line's changes; the same as spec's."""
    pair: PairFacts = PairFacts()
    """The models that ran."""
    dtype_note: str | None = None
    """Why the pair's dtype is not its file's; None if it is."""
    choice: Mapping[str, str | None] | None = None
    """The pair as the command line named it, by flag."""
    stored_spec: Mapping[str, Any] = Field(default={}, alias="spec")
    """The whole configuration as it was written; see `spec`."""
    engine: EngineStatus = EngineStatus()
    """The engine; empty if it never started."""
    environment: Environment = Environment()
    """Machine and software."""
    parity: ParityFacts = ParityFacts()
    """The gate's comparison and result; empty if it never began."""
    noise_floor: Mapping[str, Any] | None = None
    """The A/A arm's noise floor; None if it has no interval."""
    warmup: WarmupFacts = WarmupFacts()
    """How warm-up ended; empty before that."""
    stopped: str | None = None
    """Why the run stopped before its last block; None if it did not."""
    blocks: tuple[BlockEntry, ...] | None = None
    """The plan, block by block."""
    command: str | None = None
    """The command line, ready to be copied."""
    started_at: str | None = None
    """UTC time."""
    finished_at: str | None = None
    """UTC time; None while it runs."""
    gate: GateFacts = GateFacts()
    """Size of the gate's batches; empty if it never began."""
    kv_gate: KvGateFacts = KvGateFacts()
    """The K/V gate's comparison; empty if it compared nothing."""
    measuring_s: float | None = None
    """Time from the started engine to the last batch, over all tries."""
    spent_s: Mapping[str, float] | None = None
    """`measuring_s` by part: warm-up, gate, whole batches, interleaved batches, counters."""
    findings: tuple[Mapping[str, Any], ...] | None = None
    """Findings that limit the results; see `Finding`."""
    cells: tuple[Mapping[str, Any], ...] | None = None
    """Each cell's summary; see `CellResult`."""
    split: tuple[Mapping[str, Any], ...] | None = None
    """Effects of staging cells, split into the attention's and the writes'; see `Split`."""
    violations: tuple[str, ...] | None = None
    """Counts that do not add up, as sentences."""
    warnings: tuple[str, ...] | None = None
    """Half-written records after a crash, as sentences."""

    @property
    def spec(self) -> StoredSpec:
        """The whole configuration. Raises pydantic's ValidationError for another type."""
        return StoredSpec.read(self.stored_spec)

    @property
    def checks_only(self) -> bool:
        """True if the run compares outputs and times nothing (`RunSpec.checks_only`)."""
        return (self.scenario or {}).get("batches") == 0

    @property
    def checks_speculation(self) -> bool:
        """True if speculation's output is compared with plain decoding's (`nwor-bench check`)."""
        return self.checks_only and self.spec.engines

    @property
    def data_type(self) -> str | None:
        """Data type of weights and activations: what was asked for, else the engine's or pair's."""
        asked = self.spec.dtype if self.spec.dtype != "auto" else None
        return asked or self.engine.dtype or self.pair.dtype


def read_object(text: str | bytes, place: object) -> dict[str, Any]:
    """The JSON object in a file's text; {} for JSON that is none. Raises StoreError otherwise."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise StoreError.at(place, f"not valid JSON ({error})") from error
    return content if isinstance(content, dict) else {}


def parse_header(values: Mapping[str, Any], place: object) -> RunHeader:
    """The header that run.json holds; `place` is for messages.

    Raises StoreError for a part whose type differs from what nwor-bench writes.
    """
    known = {n: value for n, value in values.items() if value is not None or n not in _PARTS}
    part: tuple[str, ...] = ()
    try:
        header = RunHeader.read(known)
        part = ("spec",)
        StoredSpec.read(header.stored_spec)
        return header
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, (*part, *fault["loc"])))
        message = fault["msg"][0].lower() + fault["msg"][1:]
        raise _damaged(
            place, name, f"is {_short(fault['input'])}, but {message}", fault["input"]
        ) from error


def check_complete(header: RunHeader, place: object) -> None:
    """Raises StoreError if a part needed for resuming is missing."""
    environment = header.environment
    for name, part in (
        ("spec", header.stored_spec or None),
        ("spec.scenario", header.spec.scenario),
        ("pair", header.pair or None),
        ("choice", header.choice),
        ("blocks", header.blocks),
        ("environment", environment or None),
        ("environment.packages", environment.packages),
        ("environment.cpu", environment.cpu),
    ):
        if part is None:
            raise _damaged(place, name, "is missing", None)


def _damaged(place: object, name: str, what: str, value: object) -> StoreError:
    problem = f"{what}: the file was changed since nwor-bench wrote it; restore it"
    return StoreError.at(f"{place}: {name}", problem, value, joint=" ")


def _short(value: object) -> str:
    """A value in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
