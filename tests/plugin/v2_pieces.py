"""A V2 runner made of pieces, and its hook's windows: no vLLM engine, no GPU, no kernels."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from window_model import ModelStaging

from nwor_bench.plugin.patching import PatchSet
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.window import Window, WindowBatch
from nwor_bench.records.types import AttentionBy, NworMode, ScvMode

K = 2
LAYERS = 2


class PieceBatch(WindowBatch):
    """A window that was not captured, whose acceptance is a count a request."""

    certain, path, sources, tokens_per_request = 0, "", None, K + 1

    def fits(self, accepted: Tensor) -> bool:
        return accepted.shape == (len(self.num_draft_tokens),)

    @property
    def size(self) -> tuple[int, int]:
        """Requests, and rows of each."""
        return len(self.num_draft_tokens), K + 1


class PieceStaging(ModelStaging):
    """Staging that writes nothing, with the flags and counts that a commit leaves on the device."""

    def __init__(self) -> None:
        super().__init__(LAYERS)
        self.errors = torch.zeros(LAYERS, dtype=torch.int32)
        self.written = torch.zeros(LAYERS, dtype=torch.int32)
        self.commits = 0

    def open(self, batch: WindowBatch) -> None:
        """Take the window."""

    def allocate(self) -> None:
        """Nothing is copied here."""

    def commit(self, slots: Tensor, accepted: Tensor) -> str:
        self.commits += 1
        self.written += int(accepted.sum())
        return ""


class PiecePlanner:
    """Plans every window whole, and keeps what it was told of certain tokens."""

    def __init__(self, batch: type[PieceBatch] = PieceBatch) -> None:
        self.batch = batch
        self.certain_at_once: list[bool] = []

    def plan(self, input_batch: Any, *_: Any, certain_at_once: bool = False) -> Any:
        self.certain_at_once.append(certain_at_once)
        drafts = tuple(input_batch.num_draft_tokens_per_req.tolist())
        rows = torch.arange(sum(drafts) + len(drafts))
        return self.batch(drafts, rows, rows + 100, None), None


CHOICES = SimpleNamespace(attended=lambda size, *, equal: "ours4" if equal else "ours")
"""What attends windows, in place of `AttentionChoices`."""


def make_runner(**more: Any) -> Any:
    """A runner whose requests each accept one draft of two; `more` are further attributes."""
    sampled = lambda batch: torch.full((batch.num_reqs,), 2, dtype=torch.int32)  # noqa: E731
    own = {
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[]),
        "cudagraph_manager": None,
        "num_speculative_steps": K,
        "max_num_reqs": 8,
        "device": torch.device("cpu"),
        "execute_model": lambda scheduler_output: None,
        "prepare_attn": lambda input_batch: (None, torch.zeros(1, 8)),
        "draft_tokens_handler": SimpleNamespace(req_ids=[]),
        "sample": lambda hidden, batch, grammar: (None, sampled(batch), None),
    }
    return SimpleNamespace(**own | more)


def make_parts(staging: Any, planner: Any, **more: Any) -> Any:
    """What `set_up_staging` makes; `more` are other parts, or further ones."""
    graphs = more.pop("graphs", None) or SimpleNamespace(
        capture=lambda: None, give_up=lambda reason: None, unavailable=None
    )
    own = {
        "window": Window(staging),
        "staging": staging,
        "inputs": SimpleNamespace(open=lambda input_batch: None),
        "graphs": graphs,
        "planner": planner,
        "control_graphs": graphs,
        "sham_graphs": graphs,
        "control_planner": planner,
        "attention": PatchSet([]),
        "attention_by": AttentionBy.OURS,
        "states": None,
        "states_unavailable": None,
        "choices": CHOICES,
    }
    return SimpleNamespace(**own | more)


def hook_of(
    monkeypatch: pytest.MonkeyPatch,
    parts: Any,
    runner: Any,
    *,
    scv: ScvMode = ScvMode.OFF,
    vote: RankVote | None = None,
    update: Any = None,
    **settings: Any,
) -> Any:
    """A V2 hook in mode `stage` on these parts, not attached yet.

    Args:
        update: vLLM's, which commits can run; None: steps end with their samples.
        settings: further ones of the plugin.
    """
    from nwor_bench.plugin.runner_v2 import hook as v2_hook

    monkeypatch.setattr(v2_hook, "set_up_staging", lambda *_: (parts, None))
    monkeypatch.setattr(v2_hook, "find_update", lambda: update)
    monkeypatch.setattr(RankVote, "of_worker", lambda: vote or RankVote())
    return v2_hook.V2RunnerHook(runner, PluginSettings(NworMode.STAGE, scv, False, **settings))


def make_hook(
    monkeypatch: pytest.MonkeyPatch, vote: RankVote | None = None, **settings: Any
) -> Any:
    """A V2 hook that stages in mode `stage`, attached; `settings` are further ones."""
    parts = make_parts(PieceStaging(), PiecePlanner())
    hook = hook_of(monkeypatch, parts, make_runner(), vote=vote, **settings)
    hook.validator.validate = lambda num_sampled, *_: SimpleNamespace(
        num_accepted=num_sampled - 1, path="host", fallback_reason=None
    )
    hook.attach()
    hook.set_modes(NworMode.STAGE, ScvMode.OFF)
    return hook


def scheduled(
    requests: Sequence[str],
    finished: Iterable[str] = (),
    new: Sequence[Any] = (),
    drafts: int | Sequence[int] = K,
    **more: Any,
) -> Any:
    """A SchedulerOutput: a window of each request; `more` are further fields of it."""
    each = dict(zip(requests, np.full(len(requests), drafts).tolist(), strict=True))
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(each.values()) + len(each),
        num_scheduled_tokens={name: own + 1 for name, own in each.items()},
        scheduled_spec_decode_tokens={name: [-1] * own for name, own in each.items() if own},
        finished_req_ids=set(finished),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        **{"pending_structured_output_tokens": False, **more},
    )


def input_batch_of(requests: Sequence[str], drafts: int | Sequence[int] = K) -> Any:
    """vLLM's InputBatch of windows of so many drafts, of each request or of all."""
    each = np.full(len(requests), drafts, dtype=np.int32)
    return SimpleNamespace(
        req_ids=list(requests),
        num_reqs=len(requests),
        num_tokens=len(requests) + int(each.sum()),
        num_draft_tokens=int(each.sum()),
        num_draft_tokens_per_req=each,
    )


def run_step(
    hook: Any,
    requests: Sequence[str],
    finished: Iterable[str] = (),
    new: Sequence[Any] = (),
    prefilled: int = 0,
    drafts: int | Sequence[int] = K,
    **more: Any,
) -> None:
    """One step from the scheduler's word to the sampled tokens.

    `new` are its NewRequestData, `prefilled` the tokens of a prefill that it runs too; `more` are
    further fields of its SchedulerOutput.
    """
    runner = hook.runner
    step = scheduled(requests, finished, new, drafts, **more)
    step.total_num_scheduled_tokens += prefilled
    runner.execute_model(step)
    if not requests:
        return
    batch = input_batch_of(requests, drafts)
    runner.prepare_attn(batch)
    if hook.window is not None and hook.window.is_staging:
        kv = torch.arange(batch.num_tokens)
        for layer in range(LAYERS):
            assert hook.window.stage(layer, kv, kv)
    runner.sample(None, batch, None)
