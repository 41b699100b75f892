"""Ranges around a worker's windows: patches that exist only while NVTX is on.

They are inside the runner hook's own wrappers, around vLLM's methods, so that `sample` is vLLM's
sampling only, and `mask` and `commit` come after it. While NVTX is off no patch is in place.
"""

from collections.abc import Callable
from typing import Any

from nwor_bench.instruments.nvtx_ranges import Ranges, open_ranges
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.records.types import label_of
from nwor_bench.records.window_order import only_verifies


class WindowRanges:
    """The ranges of one runner's windows."""

    def __init__(self, hook: RunnerHook):
        self._hook = hook
        self._patches: PatchSet | None = None
        self._ranges: Ranges | None = None
        self._open = False
        self._number = 0
        self._tokens = self._drafts = self._requests = 0
        self._category = ""

    @property
    def on(self) -> bool:
        """True while ranges are emitted."""
        return self._patches is not None

    def switch(self, on: bool) -> None:
        """Emit ranges, or stop, between batches; the hook's wrappers are put around them again."""
        if on == self.on:
            return
        hook = self._hook
        attached = hook.attached
        if attached:
            hook.detach()
        if self._patches is None:
            self._ranges = open_ranges()
            self._patches = PatchSet(self._all())
            self._patches.apply()
        else:
            self._close_window()
            self._patches.undo()
            self._patches = None
        if attached:
            hook.attach()
            hook.set_modes(hook.nwor_mode, hook.validator.mode)

    def _all(self) -> list[Patch]:
        hook, runner = self._hook, self._hook.runner
        patches = [
            Patch(hook, "drain", self._wrap_drain),
            Patch(runner, "execute_model", self._wrap_execute_model),
            Patch(runner, "sample_tokens", self._wrap_sample_tokens),
            Patch(hook.validator, "validate", self._around("mask", lambda: self._drafts)),
        ]
        if hook.window is not None:
            patches += [
                Patch(hook.window, "stage", self._around("stage", lambda: self._drafts)),
                Patch(hook.window, "commit", self._around("commit", lambda: self._drafts)),
            ]
        return patches + self._of_runner(runner)

    def _of_runner(self, runner: Any) -> list[Patch]:
        """Forward, sample and draft are named differently in vLLM's two runners."""
        forward = self._around("forward", lambda: self._tokens)
        sample = self._around("sample", lambda: self._requests)
        draft = self._around("draft", lambda: self._requests)
        if self._hook.name == "V1":
            return [
                Patch(runner, "_model_forward", forward),
                Patch(runner, "_sample", sample),
                Patch(runner, "propose_draft_token_ids", draft),
            ]
        patches = [
            # Eagerly and between piecewise graphs the model is called, a full graph is replayed.
            Patch(runner.model, "forward", forward),
            Patch(runner, "sample", sample),
        ]
        if runner.speculator is not None:
            patches.append(Patch(runner.speculator, "propose", draft))
        if runner.cudagraph_manager is not None:
            patches.append(Patch(runner.cudagraph_manager, "run_fullgraph", forward))
        return [*patches, *(Patch(graphs, "replay", forward) for graphs in self._hook.graph_sets)]

    def _wrap_drain(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def drain(output_lengths: dict[str, int] | None) -> Any:
            self._number = 0  # as the records of the windows to come will be numbered
            return original(output_lengths)

        return drain

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._close_window()
            has_window = bool(scheduler_output.scheduled_spec_decode_tokens)
            has_window |= only_verifies(scheduler_output)  # as the hook's, with k = 0
            if kwargs.get("dummy_run") or not has_window:
                return original(scheduler_output, *args, **kwargs)
            self._open_window(scheduler_output)
            try:
                output = original(scheduler_output, *args, **kwargs)
            except BaseException:
                self._close_window()
                raise
            if output is not None:  # then vLLM does not sample this step
                self._close_window()
            return output

        return execute_model

    def _wrap_sample_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._close_window()

        return sample_tokens

    def _around(
        self, name: str, payload: Callable[[], int]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def in_range(*args: Any, **kwargs: Any) -> Any:
                if not self._open or self._ranges is None:
                    return original(*args, **kwargs)
                with self._ranges.span(name, payload(), self._category):
                    return original(*args, **kwargs)

            return in_range

        return wrap

    def _open_window(self, scheduler_output: Any) -> None:
        assert self._ranges is not None
        hook = self._hook
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._drafts = sum(map(len, drafts.values()))
        self._tokens = scheduler_output.total_num_scheduled_tokens
        self._requests = len(scheduler_output.num_scheduled_tokens)
        self._category = label_of(hook.nwor_mode, hook.validator.mode, None)
        self._ranges.push("window", self._number, self._category)
        self._number += 1
        self._open = True

    def _close_window(self) -> None:
        if self._open and self._ranges is not None:
            self._open = False
            self._ranges.pop()
