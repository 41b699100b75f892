"""DRAM bytes of mode `stage`'s windows, predicted by the byte model. Pure."""

from nwor_bench.models.byte_model import BY_REFERENCE, CACHE_BITS, COPY_SPILLED, DIRECT, Strategy
from nwor_bench.records.engine_status import EngineStatus
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import StageBy


def strategy_of(header: RunHeader) -> Strategy:
    """The byte model's strategy for the run's mode `stage` on a GPU."""
    by = (header.spec or {}).get("stage_by", StageBy.REFERENCE)
    return BY_REFERENCE if by == StageBy.REFERENCE else COPY_SPILLED


def predicted_difference(
    engine: EngineStatus,
    staged: float,
    accepted_tokens: float,
    strategy: Strategy = BY_REFERENCE,
    requests: float = 0.0,
) -> dict[str, float]:
    """Predicted bytes of a staged window minus those of a direct one, by counter.

    Args:
        engine: the engine's facts; `bytes_per_token` is one token's bytes in all caches.
        staged, accepted_tokens: drafts and accepted drafts of a window.
        strategy: the staging strategy.
        requests: requests of the window. By reference, the commit also writes each request's
            certain first token and reads its activations first.

    Empty if the engine's sizes are unknown.
    """
    row, dtype, cache = engine.bytes_per_token, str(engine.dtype), engine.kv_cache_dtype or "auto"
    cache = dtype if cache == "auto" else cache
    if row is None or dtype not in CACHE_BITS or cache not in CACHE_BITS:
        return {}
    wide = row * CACHE_BITS[dtype] / CACHE_BITS[cache]

    def moved(how: Strategy, reads: bool) -> float:
        return sum(
            move.rows(staged, accepted_tokens) * (wide if move.as_activations else row)
            for move in how.moves
            if move.reads is reads
        )

    first_tokens = requests * wide if strategy is BY_REFERENCE else 0.0
    return {
        "dram_read_bytes": first_tokens + moved(strategy, True) - moved(DIRECT, True),
        "dram_write_bytes": moved(strategy, False) - moved(DIRECT, False),
    }
