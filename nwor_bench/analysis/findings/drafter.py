"""The drafter: its context, what it drafts, and what its kind costs."""

from typing import Any

from nwor_bench.analysis.findings.finding import Case, Cases, Evidence, FindingKind, Row, Severity
from nwor_bench.instruments.versions import release
from nwor_bench.records.cell import method_of

RANDOM = 0.02
"""Acceptance rate of the first draft up to which drafts are as good as random tokens."""


def _shortest_context(evidence: Evidence) -> int | None:
    """Longest context of a drafter, the shortest of several engines'; None if not known."""
    arms = (evidence.engine.arms or {}).values()
    own = evidence.engine.drafter_max_model_len
    known = [own, *(facts.get("drafter_max_model_len") for facts in arms)]
    return min((length for length in known if length is not None), default=None)


def _speculative(evidence: Evidence) -> dict[str, Any]:
    """Further settings of vLLM's speculative_config."""
    header = evidence.run.header
    return {**(header.pair.speculative or {}), **(header.spec.speculative_config or {})}


def _drafter_context(evidence: Evidence) -> Cases:
    drafter, target = _shortest_context(evidence), evidence.scenario.get("max_model_len", 0)
    if drafter is not None and drafter < target:
        yield Case({"drafter": drafter, "target": target, "longest": evidence.longest})


def _acceptance(evidence: Evidence) -> Cases:
    """First drafts are as good as random ones, and requests no longer than the drafter's context.
    Synthetic acceptance is what was asked for."""
    context = _shortest_context(evidence)
    synthetic = _speculative(evidence).get("rejection_sample_method") == "synthetic"
    if synthetic or (context is not None and evidence.longest > context):
        return
    rates: dict[str | None, float] = {}
    for cell in evidence.cells:
        for rate in cell.acceptance_per_position[:1]:
            method = method_of(cell.cell.drafts)
            rates[method] = max(rate, rates.get(method, 0.0))
    for method, rate in rates.items():
        if rate <= RANDOM:
            yield Case({"rate": 100 * rate, "of": f" of {method}" if method else ""})


def _prefix_block(evidence: Evidence) -> Cases:
    """vLLM 0.33 drops none unless it is asked to, as its hashes cover what the drafter reads."""
    header, engine, config = evidence.run.header, evidence.engine, _speculative(evidence)
    hashes = release(engine.vllm or "") >= (0, 33) and not config.get(
        "disable_lookahead_block_hashes"
    )
    keeps = hashes or config.get("disable_eagle_block_drop")
    caches = header.spec.engine_args.get("enable_prefix_caching")
    if header.pair.method in ("eagle", "eagle3", "mtp") and caches and not keeps:
        yield Case({"method": header.pair.method, "size": engine.block_size})


ROWS = (
    Row(FindingKind.DRAFTER_CONTEXT, _drafter_context,
        "The drafter reads at most {drafter:,} tokens and the target {target:,}: in longer "
        "requests no draft is accepted (the longest of these has {longest:,}).",
        "Write --max-model-len {drafter}. Or take a drafter with a longer context.",
        "The drafter's context is short"),
    Row(FindingKind.ACCEPTANCE, _acceptance,
        "Only {rate:.1f} % of first drafts{of} were accepted, as of random ones: the drafter is "
        "not this target's, or the prompts are random tokens.",
        "Use text, and this target's drafter. --prompts takes a file.",
        "Drafts are like random ones"),
    Row(FindingKind.PREFIX_BLOCK, _prefix_block,
        "With {method} this vLLM drops the last block of every prefix that it finds in its cache: "
        "{size:,} tokens or fewer are computed again.",
        "Use vLLM 0.33, which drops none. Or disable_eagle_block_drop in --speculative-config, "
        "which may cost acceptance.", "Cached prefixes lose a block", Severity.NOTE),
)  # fmt: skip
