"""The KV cache of a vLLM in this process, for the K/V gate."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from nwor_bench.engine.protocol import Pair, Span
from nwor_bench.errors import EngineError


class VllmKvCache:
    """The KV cache of a vLLM in this process.

    Args:
        llm: vLLM's `LLM`.
        rpc_all: calls a worker method; the answer of every rank.
        running: entered while vLLM runs; raises DeviceDiedError if the device fails.
    """

    def __init__(
        self,
        llm: Any,
        rpc_all: Callable[..., list[Any]],
        running: Callable[[], AbstractContextManager[None]],
    ):
        self._llm = llm
        self._rpc_all = rpc_all
        self._running = running
        self._requests: list[str] = []
        self._watching = False

    def close(self) -> None:
        """Drop the reference to the engine, so that its memory can be released."""
        self._llm = None

    def before_batch(self) -> None:
        """Forget the previous batch's blocks, if watching."""
        if self._watching:
            self._rpc_all("nwor_watch_blocks", True)

    def last_batch(self, outputs: Sequence[Any]) -> None:
        """Remember the ids of the requests that have just finished."""
        self._requests = [output.request_id for output in outputs]

    def watch(self, on: bool) -> None:
        """See `KvCache`."""
        self._watching = on
        self._rpc_all("nwor_watch_blocks", on)

    def prefill(
        self, sequences: Sequence[Sequence[int]], *, nudged: bool = False, outputs: int = 1
    ) -> None:
        """See `KvCache`. Each sequence is a prompt."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=outputs, temperature=0.0, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(sequence)} for sequence in sequences]
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM could not reset its prefix cache before a prefill")
        self.before_batch()
        if nudged:
            self._rpc_all("nwor_nudge_attention", True)
        try:
            with self._running():
                self.last_batch(self._llm.generate(inputs, params, use_tqdm=False))
        finally:
            if nudged:
                self._rpc_all("nwor_nudge_attention", False)

    def keep(self, name: str, spans: Sequence[Span]) -> str | None:
        """See `KvCache`."""
        kept = self._rpc_all("nwor_keep_kv", name, self._requests, [list(span) for span in spans])
        return next((rank["unreadable"] for rank in kept if rank["unreadable"]), None)

    def compare(self, name: str, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
        """See `KvCache`."""
        return self._rpc_all("nwor_compare_kv", name, [list(pair) for pair in pairs])

    def drop(self, names: Sequence[str]) -> None:
        """See `KvCache`."""
        self._rpc_all("nwor_drop_kv", list(names))

    def keep_states(self, name: str) -> dict[int, int]:
        """See `KvCache`."""
        ranks = [dict(each) for each in self._rpc_all("nwor_keep_states", name, self._requests)]
        return {i: n for i, n in ranks[0].items() if all(rank.get(i) == n for rank in ranks)}

    def compare_states(
        self, name: str, other: str, pairs: Sequence[tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """See `KvCache`."""
        ranks = self._rpc_all("nwor_compare_states", name, other, [list(pair) for pair in pairs])
        return [{"errors": errors} for errors in ranks]

    def drop_states(self, names: Sequence[str]) -> None:
        """See `KvCache`."""
        self._rpc_all("nwor_drop_states", list(names))
