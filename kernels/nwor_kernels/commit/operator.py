"""`nwor::commit_staged_kv_cache` on a GPU: commit from staging buffers."""

from collections.abc import Sequence

from torch import Tensor

from nwor_kernels.commit.plan import CommitPlan
from nwor_kernels.commit.sources import StagedSources
from nwor_kernels.metadata import ERROR_FLAG

_kept_plans: dict[object, tuple[CommitPlan, StagedSources]] = {}
_MOST_KEPT_PLANS = 8


def commit_staged_kv_cache_triton(
    staged_key: Tensor,
    staged_value: Tensor,
    kv_caches: Sequence[Tensor],
    slots: Tensor,
    accepted: Tensor,
    layer_metadata: Tensor,
    slot_rows: Sequence[int] | None = None,
    written: Tensor | None = None,
) -> None:
    """`commit_staged_kv_cache_reference` in one launch.

    Staging buffers are sources whose layers stand at a fixed pitch. The tables are kept for the
    next call, but finding them takes host time for each layer: hot paths keep a `CommitPlan`
    and call that.
    """
    tensors = (staged_key, staged_value, *kv_caches)
    layout = tuple((t.data_ptr(), t.dtype, t.device, t.shape, t.stride()) for t in tensors)
    key = (layout, None if slot_rows is None else tuple(slot_rows))
    kept = _kept_plans.get(key)
    if kept is None:
        if len(_kept_plans) >= _MOST_KEPT_PLANS:
            _kept_plans.clear()
        sources = StagedSources(list(staged_key), list(staged_value))
        kept = _kept_plans[key] = (CommitPlan(kv_caches, slot_rows=slot_rows), sources)
    plan, sources = kept
    plan.commit_windows(
        sources,
        slots,
        None,
        layer_metadata[:, ERROR_FLAG],
        accepted=accepted,
        layer_metadata=layer_metadata,
        written=written,
    )
