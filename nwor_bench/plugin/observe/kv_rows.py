"""K/V rows of finished requests, copied out of the cache under a name and compared by name.

Each KV-cache group gives a request blocks of its own, so each group's layers are read apart
(`group_rows.py`), and their errors are told together.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nwor_bench.plugin.observe.block_tables import BlockWatch
from nwor_bench.plugin.observe.group_rows import GroupRows, LayerRows, Pair
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.staging.layers import rows_of


class KvRows:
    """K/V rows that one worker keeps for the K/V gate.

    Args:
        hook: the runner's hook, which knows the target's layers.
    """

    def __init__(self, hook: RunnerHook):
        layers = _layers_by_group(hook)
        self._watch = BlockWatch(hook.runner, layers)
        self._groups = {
            group: GroupRows(self._watch.tables[group], theirs) for group, theirs in layers.items()
        }
        self._watch.before_loss = {group: rows.rescue for group, rows in self._groups.items()}

    def watch(self, on: bool) -> None:
        """Start to note a batch's blocks, or stop and forget all rows."""
        for rows in self._groups.values():
            rows.forget_rescued()
        self._watch.switch(on and self.why_unreadable() is None)
        if not on:
            self.drop(None)

    def why_unreadable(self) -> str | None:
        """Why the cache cannot be read row by row; None if it can be."""
        if not self._groups:
            return "there is no target layer with a KV cache"
        found = (rows.why_unreadable() for rows in self._groups.values())
        return next((reason for reason in found if reason is not None), None)

    def keep(
        self, name: str, requests: Sequence[str], spans: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Copy the rows of these positions of these requests, one span a request.

        Returns `unreadable` (None, or why nothing was kept) and `bytes`.
        """
        reason = self.why_unreadable()
        if reason is not None:
            return {"unreadable": reason, "bytes": 0}
        kept = sum(rows.keep(name, requests, spans) for rows in self._groups.values())
        return {"unreadable": None, "bytes": kept}

    def drop(self, names: Sequence[str] | None) -> None:
        """Forget kept rows; None: all of them, and their memory is given back to the device."""
        for rows in self._groups.values():
            rows.drop(names)
        if names is None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def compare(self, name: str, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Errors of kept rows against other kept rows of the same token ids.

        Positions that are not in both sets are left out; the caller knows the spans.

        Returns:
            `checked` and `unknown`: positions compared, and those whose block was reused, of the
            group that knows the fewest.
            `errors`: for each layer and K or V the dicts of `errors_of`, which also tell `layer`,
            `name` and `what`; layer by layer.
        """
        found = [rows.compare(name, pairs) for rows in self._groups.values()]
        errors = [entry for each in found for entry in each["errors"]]
        return {
            "checked": min(each["checked"] for each in found),
            "unknown": max(each["unknown"] for each in found),
            "errors": sorted(errors, key=lambda entry: entry["layer"]),
        }


def _layers_by_group(hook: RunnerHook) -> dict[int, list[LayerRows]]:
    """The target's layers that have K/V, by the number of their KV-cache group."""
    context = hook.runner.compilation_config.static_forward_context
    numbers = {name: number for number, name in enumerate(hook.target_layers)}
    found: dict[int, list[LayerRows]] = {}
    for group, each in enumerate(hook.runner.kv_cache_config.kv_cache_groups):
        for name in each.layer_names:
            if name not in numbers:
                continue
            layer = context[name]
            dtype = str(getattr(layer, "kv_cache_dtype", "auto"))
            rows = LayerRows(numbers[name], name, *_rows_of(layer), dtype)
            found.setdefault(group, []).append(rows)
    return found


def _rows_of(layer: Any) -> tuple[Any, int]:
    return rows_of(layer) if hasattr(layer, "head_size") else (layer.kv_cache, 0)
