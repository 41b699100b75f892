"""The KV cache of a vLLM in this process, for the K/V gate."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from nwor_bench.engine.protocol import Kept, KeptPair, Span
from nwor_bench.errors import EngineError


class _KeptTensors:
    """See `KeptTensors`.

    Args:
        kind: "rows" or "states", as the workers name them.
        requests: names of the last batch's requests.
    """

    def __init__(
        self, kind: str, rpc_all: Callable[..., list[Any]], requests: Callable[[], list[str]]
    ):
        self._kind = kind
        self._rpc_all = rpc_all
        self._requests = requests

    def keep(self, name: str, spans: Sequence[Span] = ()) -> Kept:
        given = [list(span) for span in spans]
        ranks = self._rpc_all("nwor_keep", self._kind, name, self._requests(), given)
        unreadable = next((rank["unreadable"] for rank in ranks if rank["unreadable"]), None)
        first, *others = [dict(rank["tokens"]) for rank in ranks]
        same = {i: n for i, n in first.items() if all(rank.get(i) == n for rank in others)}
        return Kept(unreadable, same)

    def compare(self, name: str, pairs: Sequence[KeptPair]) -> list[dict[str, Any]]:
        return self._rpc_all("nwor_compare", self._kind, name, [list(pair) for pair in pairs])

    def drop(self, names: Sequence[str]) -> None:
        self._rpc_all("nwor_drop", self._kind, list(names))


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
        self.rows, self.states = (
            _KeptTensors(kind, rpc_all, lambda: self._requests) for kind in ("rows", "states")
        )

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
