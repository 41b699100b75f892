"""Read the engine's KV cache: rows are kept by name and compared on every rank."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nwor_bench.errors import EngineError

Span = tuple[int, int]
"""First position of a request and the one behind the last."""

Pair = tuple[int, str, int, int]
"""(request of this set, other set, its request there, length of its prompt)."""


class KvCache(Protocol):
    """The engine's KV cache, for the K/V gate; rows stay in the engine's workers."""

    def watch(self, on: bool) -> None:
        """Note the blocks of every request from now on, or stop and forget all kept rows."""

    def prefill(self, sequences: Sequence[Sequence[int]], *, nudged: bool = False) -> None:
        """Compute these tokens' K/V from an empty prefix cache, in the mode that is on.

        `nudged`: every layer's attention returns values that are off by one rounding step.
        """

    def keep(self, name: str, spans: Sequence[Span]) -> str | None:
        """Keep rows of the last batch's requests; returns why it is unreadable, else None."""

    def compare(self, name: str, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
        """One dict per rank: `checked` and `unknown` positions, and `errors` per layer."""

    def drop(self, names: Sequence[str]) -> None:
        """Forget kept rows."""


class VllmKvCache:
    """The KV cache of a vLLM in this process.

    Args:
        llm: vLLM's `LLM`.
        rpc_all: calls a worker method; the answer of every rank.
    """

    def __init__(self, llm: Any, rpc_all: Callable[..., list[Any]]):
        self._llm = llm
        self._rpc_all = rpc_all
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

    def prefill(self, sequences: Sequence[Sequence[int]], *, nudged: bool = False) -> None:
        """See `KvCache`. Each sequence is a prompt with one token to be sampled."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        inputs = [{"prompt_token_ids": list(sequence)} for sequence in sequences]
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM could not reset its prefix cache before a prefill")
        self.before_batch()
        if nudged:
            self._rpc_all("nwor_nudge_attention", True)
        try:
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
