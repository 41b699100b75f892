"""What the ranks kept is one answer: what all of them have."""

from typing import Any

from nwor_bench.engine.kv_cache import VllmKvCache
from nwor_bench.engine.protocol import Kept


def kept(*ranks: dict[str, Any]) -> Kept:
    calls = []

    def rpc_all(method: str, *given: Any) -> list[Any]:
        calls.append((method, *given))
        return list(ranks)

    found = VllmKvCache(None, rpc_all, lambda: None).states.keep("cell")  # type: ignore[arg-type, return-value]
    assert calls == [("nwor_keep", "states", "cell", [], [])]
    return found


def test_states_count_that_every_rank_has_after_as_many_tokens() -> None:
    first = {"unreadable": None, "tokens": [(0, 12), (1, 10), (2, 8)]}
    second = {"unreadable": None, "tokens": [(0, 12), (1, 9)]}
    assert kept(first) == Kept(tokens={0: 12, 1: 10, 2: 8})
    assert kept(first, second) == Kept(tokens={0: 12})


def test_one_rank_that_cannot_read_is_enough() -> None:
    fine: dict[str, Any] = {"unreadable": None, "tokens": []}
    assert kept(fine, {**fine, "unreadable": "no heads"}).unreadable == "no heads"
