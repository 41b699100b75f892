"""What the byte model says that windows of mode `stage` move in DRAM. Pure."""

from nwor_bench.models.byte_model import CACHE_BITS
from nwor_bench.models.strategies import BY_REFERENCE, COPY_IN_L2, COPY_SPILLED, DIRECT, Strategy
from nwor_bench.records.engine_status import EngineStatus, StageL2Facts
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import StageBy


def strategy_of(header: RunHeader) -> Strategy:
    """How the run's mode `stage` held drafts on a GPU, as the byte model knows it.

    Copies count as kept in L2 only where all of them were, by what the GPU gave.
    """
    if (header.spec or {}).get("stage_by", StageBy.REFERENCE) == StageBy.REFERENCE:
        return BY_REFERENCE
    l2 = (header.engine or EngineStatus()).stage_l2 or StageL2Facts()
    kept, buffer = l2.kept_bytes, l2.buffer_bytes
    if l2.unavailable or kept is None or buffer is None:
        return COPY_SPILLED
    return COPY_IN_L2 if kept >= buffer else COPY_SPILLED


def predicted_difference(
    engine: EngineStatus,
    staged: float,
    accepted_tokens: float,
    strategy: Strategy = BY_REFERENCE,
    requests: float = 0.0,
) -> dict[str, float]:
    """What the byte model says that a staged window moves more (or less) than a direct one.

    Args:
        engine: the run's facts about it; `bytes_per_token` is what one token takes in the caches.
        staged, accepted_tokens: drafts of a window, and those accepted.
        strategy: how drafts are held until the commit.
        requests: those of the window. Held by reference, the certain first token of each waits
            for the commit too, which reads it back; it is written once either way.

    Empty where the engine's sizes are not known.
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
