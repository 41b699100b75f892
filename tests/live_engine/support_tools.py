"""What `nwor-bench supports` predicts of a model, held to what a CPU engine with it says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nwor_bench.models.support.facts import Device, EngineFacts, attention_of, read_facts
from nwor_bench.models.support.predict import Method, Outcome, method_support, predict_support
from nwor_bench.records.engine_status import EngineStatus
from nwor_bench.workload.run_spec import RunSpec


def check_support(folder: Path, status: EngineStatus, spec: RunSpec, method: str = "ngram") -> None:
    """Reason, runner and attention of the engine are the predicted ones, and so is the method."""
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    given = spec.engine_args
    facts = EngineFacts(
        device=Device.CPU,
        draft_tokens=spec.scenario.draft_tokens,
        cache_dtype=given.get("kv_cache_dtype", "auto"),
        one_group=given.get("disable_hybrid_kv_cache_manager", False),
        eager=True,
    )
    model = read_facts(config, "tiny", "config", str(folder))
    found = predict_support(model, facts)
    assert (found.reason, found.runner) == (status.staging_unavailable, status.runner)
    attentions = [attention_of(layer, model, Device.CPU) for layer in model.layers]
    first = next((each.implementation for each in attentions if each is not None), None)
    assert first == status.attention_backend
    own = method_support(model, facts, Method(method))
    assert own.reason == status.staging_unavailable
    assert own.outcome is (Outcome.DIRECT if own.reason else Outcome.STAGED)
