"""Made-up runs of `nwor-bench check`: two engines, k = 0 and k = 4, of which only the gate ran."""

from dataclasses import replace
from typing import Any

from synthetic_run import change_batches, kept, make_run, with_header, with_parts

from nwor_bench.analysis.analyse import Analysis, analyse
from nwor_bench.analysis.parity.tokens import TIES_EVENT
from nwor_bench.records.cell import AA, Drafts
from nwor_bench.records.store import RunData
from nwor_bench.records.types import NworMode, ScvMode, WindowRecord

K = Drafts(4)
TIE = {"request": 1, "position": 7, "token": 62, "reference": 215, "gap": 0.0312, "is_tie": True}
FAR = {**TIE, "request": 0, "position": 2, "gap": 0.312, "is_tie": False}
UNKNOWN = {**FAR, "gap": None}


def check_run(requests: int = 4, parity: str | None = "exact", **engine: Any) -> RunData:
    """A check of 4 drafts at one batch size, whose engine has these facts."""
    whole = make_run(blocks=0, aa=True)
    own = kept(whole, lambda r: r.scv_mode == ScvMode.OFF)
    run = replace(
        own,
        batches=tuple(map(_of_counts, own.batches)),
        windows=tuple(map(_of_counts, own.windows)),
    )
    run = change_batches(run, lambda b: b.arm == str(K), parity=parity)
    run = with_header(
        run, "scenario", requests=requests, batches=0, max_model_len=1024, max_new_tokens=32
    )
    run = with_header(run, "spec", draft_counts=[0, 4], engines=True)
    run = with_header(run, "engine", **{"vllm": "0.32.0", "arms": {str(K): {}}, **engine})
    blocks = [{"block": 0, "order": [], "prompt_ids": [f"chat-{i}" for i in range(requests)]}]
    command = "nwor-bench check FOLDER --output runs/x --dtype bfloat16 --requests 1,4"
    return with_parts(
        run,
        blocks=blocks,
        command=command,
        choice={"target_model": "FOLDER"},
        gate={"longest_prompt": 300},
    )


def _of_counts(record: Any) -> Any:
    """A record of the grid as one of draft counts; mode stage is k = 4, off x off k = 0."""
    arm = str(K) if record.nwor_mode == NworMode.STAGE else record.arm or str(Drafts(0))
    nothing: dict[str, Any] = {"staged_tokens": 0, "committed_tokens": 0}
    if isinstance(record, WindowRecord):
        nothing |= {"rejected_tokens": 0, "stage_operations": 0, "fallback_reason": None}
        nothing |= {"bytes_staged": None, "bytes_committed": None, "bytes_avoided": None}
    if arm != str(K):
        nothing |= {"draft_tokens": 0, "accepted_tokens": 0}
    return replace(record, nwor_mode=NworMode.OFF, arm=arm, **nothing)


def with_places(run: RunData, *places: dict[str, Any], compared: int = 100) -> RunData:
    """The run with these differing tokens."""
    event = {
        "event": TIES_EVENT,
        "arm": str(K),
        "tokens_compared": compared,
        "allowance": 0.0957,
        "places": list(places),
    }
    return replace(run, events=(*run.events, event))


def failed(run: RunData, error: str) -> RunData:
    """The run as if its engine had died in the batch of k = 4."""
    event = {"event": "failed", "error": error}
    run = kept(run, lambda r: r.arm == str(Drafts(0)))
    return replace(with_parts(run, status="failed"), events=(event,))


def unsteady(run: RunData) -> RunData:
    """The run with plain decoding that does not repeat itself."""
    return change_batches(
        run, lambda b: b.arm == AA, parity="INVALID", first_mismatch="request 1: 2 not 3"
    )


def checked(run: RunData) -> Analysis:
    """The run's analysis."""
    return analyse(run)
