"""Ask one engine the same in both modes, and hold what every row of the checklist holds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_tools import total_of

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.readings import VllmCounters, disagreement, read_counters
from nwor_bench.models.methods import Method
from nwor_bench.models.support.facts import Device, EngineFacts, attention_of, read_facts
from nwor_bench.models.support.predict import Outcome, Part, method_support, predict_support
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.fallback_reasons import mamba_cache_mode
from nwor_bench.records.types import Cell, NworMode, ScvMode, WindowRecord
from nwor_bench.records.window import windows_of
from nwor_bench.workload.run_spec import RunSpec


@dataclass(frozen=True)
class Answers:
    """What a batch said, what vLLM counted, and its windows."""

    tokens: list[tuple[int, ...]]
    texts: list[str]
    finish_reasons: list[str | None]
    counters: VllmCounters
    windows: list[WindowRecord]

    def total(self, name: str) -> int:
        """Sum of one count over the windows."""
        return total_of(self.windows, name)

    def counted(self, name: str) -> int:
        """Drafts or accepted tokens less what vLLM does not count.

        These are drafts that a grammar forbids, and with async scheduling whole windows of
        requests that had finished.
        """
        return self.total(f"{name}_tokens") - self.total(f"uncounted_{name}_tokens")

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """`tokens`, as a measured batch (`BatchOutput`) names them."""
        return self.tokens

    @property
    def fallbacks(self) -> set[str | None]:
        """Why windows were written directly; None stands for those that were staged."""
        return {window.fallback_reason for window in self.windows}


def ask(
    engine: VllmEngine,
    nwor: str,
    prompts: Sequence[Any],
    params: Any,
    *,
    scv: str = "off",
    seed: int = 7,
    keep_cache: bool = False,
    **arguments: Any,
) -> Answers:
    """One batch in these modes, with any SamplingParams (one, or a list with one a request).

    Prompts are token ids, or vLLM's own dicts.
    `keep_cache`: let the batch find what earlier ones left in the prefix cache.
    """
    engine.set_modes(Cell("tiny", NworMode(nwor), ScvMode(scv)))
    if not keep_cache:
        assert engine._llm.reset_prefix_cache()
    engine._rpc("nwor_seed", seed)
    engine._rpc("nwor_drain")
    before = read_counters(engine._llm)
    inputs = [each if isinstance(each, dict) else {"prompt_token_ids": each} for each in prompts]
    cache: Any = engine.kv_cache()
    cache.before_batch()  # as the engine does around a batch: a gate may watch
    outputs = engine._llm.generate(inputs, params, use_tqdm=False, **arguments)
    cache.last_batch(outputs)
    lengths = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
    ranks = engine._rpc_all("nwor_drain", lengths)
    assert [rank["device_errors"] for rank in ranks] == [[]] * len(ranks)
    assert disagreement([rank["windows"] for rank in ranks]) is None
    first = [output.outputs[0] for output in outputs]
    return Answers(
        tokens=[tuple(answer.token_ids) for answer in first],
        texts=[answer.text for answer in first],
        finish_reasons=[answer.finish_reason for answer in first],
        counters=read_counters(engine._llm).minus(before),
        windows=windows_of(ranks[0]["windows"]),
    )


def greedy(max_tokens: int = 40, **settings: Any) -> Any:
    """Greedy SamplingParams of a fixed length; `settings` are SamplingParams' own."""
    from vllm import SamplingParams

    fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=max_tokens, **{**fixed, **settings})


def check_counts(engine: VllmEngine, answers: Answers) -> None:
    """Every window staged, settled and closed, and vLLM counted the same."""
    assert answers.fallbacks == {None}
    assert answers.total("staged_tokens") == answers.total("draft_tokens") > 0
    assert answers.counted("draft") == answers.counters.draft_tokens
    assert answers.counted("accepted") == answers.counters.accepted_tokens
    assert answers.total("committed_tokens") == answers.total("accepted_tokens")
    settled = answers.total("committed_tokens") + answers.total("rejected_tokens")
    assert answers.total("staged_tokens") == settled
    layers = engine.status().target_layers
    assert answers.total("stage_operations") == layers * answers.total("staged_tokens")
    check_no_open_window(engine)


def check_no_open_window(engine: VllmEngine) -> None:
    """Between batches no window is open and no draft is held, on any rank."""
    assert set(engine._rpc_all("nwor_window_state")) <= {None, "idle"}


def compare(
    engine: VllmEngine,
    prompts: Sequence[Any],
    params: Any,
    scv_modes: Sequence[str],
    fallback: str | None = None,
    **arguments: Any,
) -> tuple[Answers, Answers]:
    """Ask in mode off, then staged in each of these SCV modes; the first and the last answers.

    Windows are staged, or all of them are written directly with the reason `fallback`.
    """
    stock = ask(engine, "off", prompts, params, **arguments)
    for scv in scv_modes:
        staged = ask(engine, "stage", prompts, params, scv=scv, **arguments)
        if fallback is None:
            check_same(engine, staged, stock)
        else:
            check_written_directly(engine, staged, stock, fallback)
    return stock, staged


def check_written_directly(
    engine: VllmEngine, staged: Answers, stock: Answers, fallback: str
) -> None:
    """Nothing was staged, for that reason alone, and the answers are those of `off`."""
    assert staged.tokens == stock.tokens
    assert staged.counters == stock.counters
    assert staged.fallbacks == {fallback}
    assert staged.total("staged_tokens") == staged.total("committed_tokens") == 0
    check_no_open_window(engine)


def check_partial(answers: Answers) -> None:
    """Some drafts were accepted and some were not."""
    assert 0 < answers.counters.accepted_tokens < answers.counters.draft_tokens


def metric(engine: VllmEngine, name: str) -> int:
    """vLLM's own counter, over all of its labels."""
    return sum(int(m.value) for m in engine._llm.get_metrics() if m.name == name)


def check_same(engine: VllmEngine, staged: Answers, stock: Answers) -> None:
    """Staging said what `off` said, and its counts add up."""
    assert staged.tokens == stock.tokens
    assert staged.texts == stock.texts
    assert staged.finish_reasons == stock.finish_reasons
    assert staged.counters == stock.counters
    assert stock.total("staged_tokens") == 0
    check_counts(engine, staged)


def check_cache(engine: VllmEngine, prompts: Sequence[list[int]], answers: Answers) -> None:
    """What a staged batch left in the prefix cache is what the stock batch would have left.

    Each conversation goes on from the blocks that the batch filled, and once more from an empty
    cache: a K or V that is wrong or missing gives other tokens.
    """
    turns = [p + list(t) + [90, 91] for p, t in zip(prompts, answers.tokens, strict=True)]
    onward = ask(engine, "off", turns, greedy(16), keep_cache=True)
    afresh = ask(engine, "off", turns, greedy(16))
    assert onward.tokens == afresh.tokens


def check_support(folder: Path, status: EngineStatus, spec: RunSpec, method: str = "ngram") -> None:
    """Reason, runner and attention of the engine are the predicted ones, and so is the method."""
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    given = spec.engine_args
    facts = EngineFacts(
        device=Device.CPU,
        draft_tokens=spec.scenario.draft_tokens,
        cache_dtype=given.get("kv_cache_dtype", "auto"),
    )
    model = read_facts(config, "tiny", "config", str(folder))
    found = predict_support(model, facts)
    assert (found.reason, found.runner) == (status.staging_unavailable, status.runner)
    if found.part is Part.BOTH:
        assert status.states_unavailable in (None, mamba_cache_mode("align"))
    elif found.recurrent and found.reason is None:
        assert str(status.states_unavailable).startswith("unsupported_states:")
    attentions = [attention_of(layer, model, Device.CPU) for layer in model.layers]
    first = next((each.implementation for each in attentions if each is not None), None)
    assert first == status.attention_backend
    own = method_support(model, facts, Method(method))
    assert own.reason == status.staging_unavailable
    assert own.outcome is (Outcome.DIRECT if own.reason else Outcome.STAGED)
