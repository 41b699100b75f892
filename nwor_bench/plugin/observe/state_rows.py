"""Live recurrent states of some requests, copied within a batch under a name and compared by name.

Every window overwrites a request's states, and with async scheduling vLLM runs on behind its last
token: after a batch nobody knows how many tokens the states stand for. So those of a sample of
requests are copied as a step begins, from where vLLM is about to read them: in the first step that
begins within the last k + 1 tokens of the request. The device decides which step that is, since the
host counts drafts that may be rejected; so the gate's batches run as asynchronously as others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_bench.errors import BenchError
from nwor_bench.plugin.observe.errors import place_for
from nwor_bench.plugin.observe.kept_rows import KeptPair, KeptRows, RowPart, RowStore
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.scheduler_output import external_request_id
from nwor_bench.plugin.state_layers import StateLayer

SAMPLE = 8
"""Most requests of a batch whose states are copied, spread evenly over it."""

LIVE_BYTES = 512 << 20
"""Most memory of their states on the device; one request's may be more."""

ROOM = 4
"""The device must have this many times the memory of the copies free."""

WHAT = ("recurrent state", "convolution state")


class StepStates(NamedTuple):
    """A step that is about to begin."""

    req_ids: Sequence[str]
    most_computed: Sequence[int]
    """[requests], tokens in the states, counted as if every draft in flight were accepted."""
    computed: Tensor
    """[requests] int, the tokens themselves."""
    accepted: Tensor
    """[requests] int32, tokens that the step before left: which state vLLM reads."""
    tables: Mapping[int, Tensor]
    """By KV-cache group, [at least requests, at least k + 1] int32, slots of each request."""


class Sample:
    """The requests of a batch that are followed: at most `most`, spread evenly over it.

    Attributes:
        targets: by name, the tokens with which a step must begin for the states to be copied.
        places: by name, from 0 to `most` - 1.
    """

    def __init__(self, most: int):
        self.targets: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self._free = list(range(most))
        self._stride = 1
        self._started: dict[str, int] = {}

    def add(self, name: str, target: int) -> int | None:
        """A request starts; its place if it is followed, in stead of another one perhaps."""
        if name in self._started:
            return None  # V2 sends resumed requests as new ones, too
        number = self._started[name] = len(self._started)
        if number % self._stride == 0 and not self._free:
            self._stride *= 2
            for other in [old for old in self.places if self._started[old] % self._stride]:
                self._free.append(self.places.pop(other))
                del self.targets[other]
        if number % self._stride:
            return None
        self.targets[name], self.places[name] = target, self._free.pop(0)
        return self.places[name]


class StateRows(RowStore):
    """States that one worker keeps for the state gate; the runner is wrapped while it is on."""

    def __init__(self, hook: RunnerHook):
        runner = hook.runner
        self._runner = runner
        self._layers: Sequence[StateLayer] = hook.states.layers if hook.states else ()
        super().__init__(
            RowPart(2 * number + k, {"layer": number, "name": layer.name, "what": what})
            for number, layer in enumerate(self._layers)
            for k, what in enumerate(WHAT)
        )
        self._groups = [layer.cache_group for layer in self._layers]
        self._drafts: int = runner.vllm_config.speculative_config.num_speculative_tokens
        self._sample = Sample(SAMPLE)
        self._live: list[tuple[Tensor, Tensor]] = []
        self._reached = torch.zeros(SAMPLE, dtype=torch.int64, device=runner.device)
        begins = Patch(runner, "_model_forward", self._wrap_model_forward)
        if hook.name == "V2":
            begins = Patch(runner, "prepare_attn", self._wrap_prepare_attn)
        scheduled = Patch(runner, "execute_model", self._wrap_execute_model)
        self._patches = PatchSet([scheduled, begins])

    def watch(self, on: bool) -> None:
        """Start to follow a batch's requests, again if already on; or stop and forget all."""
        if not self._layers:
            return
        self._sample = Sample(self._room())
        self._reached.zero_()
        if not on:
            self._patches.undo()
            self.drop(None)
            self._live = []
        elif not self._patches.applied:
            self._patches.apply()

    def _room(self) -> int:
        """Requests whose states may be copied."""
        if self._live:
            return len(self._live[0][0])
        most, device = LIVE_BYTES, self._runner.device
        if device.type == "cuda":
            most = min(most, torch.cuda.mem_get_info(device)[0] // ROOM)
        return max(1, min(SAMPLE, most // sum(layer.state_bytes for layer in self._layers)))

    # While a batch runs.

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("dummy_run"):
                for new in scheduler_output.scheduled_new_reqs:
                    self._follow(new)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    def _follow(self, new: Any) -> None:
        params = new.sampling_params
        if new.prompt_token_ids is None or params is None:
            return
        prompt = len(new.prompt_token_ids)
        last = prompt + (params.max_tokens or 0) - 1  # the last token has no state
        target = max(prompt, last - self._drafts - 1)
        place = self._sample.add(external_request_id(new.req_id), target)
        if place is not None:
            self._reached[place].zero_()

    def _wrap_model_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _model_forward(*args: Any, **kwargs: Any) -> Any:
            runner = self._runner
            tables = runner.input_batch.block_table
            requests = runner.input_batch.num_reqs
            computed = (
                runner.seq_lens[:requests] - runner.query_start_loc.gpu[: requests + 1].diff()
            )
            self._take(
                StepStates(
                    runner.input_batch.req_ids,
                    computed.tolist(),
                    computed,
                    runner.num_accepted_tokens.gpu[:requests],
                    {group: tables[group].get_device_tensor(requests) for group in self._groups},
                )
            )
            return original(*args, **kwargs)

        return _model_forward

    def _wrap_prepare_attn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(input_batch: Any) -> Any:
            tables, slot_mappings = original(input_batch)
            requests = input_batch.num_reqs
            lengths = input_batch.query_start_loc[: requests + 1].diff()
            accepted = self._runner.model_state.num_accepted_tokens_gpu
            self._take(
                StepStates(
                    input_batch.req_ids,
                    input_batch.num_computed_tokens_np,
                    input_batch.seq_lens[:requests] - lengths,
                    accepted[input_batch.idx_mapping],
                    dict(enumerate(tables)),
                )
            )
            return tables, slot_mappings

        return prepare_attn

    def _take(self, step: StepStates) -> None:
        """Copy the states of those requests that begin the step with enough tokens."""
        names = [external_request_id(req_id) for req_id in step.req_ids]
        targets = self._sample.targets
        rows = [
            row
            for row, name in enumerate(names)
            if name in targets and step.most_computed[row] >= targets[name]
        ]
        if not rows:
            return
        places = [self._sample.places[names[row]] for row in rows]
        row, place, target = self._on_device([rows, places, [targets[names[row]] for row in rows]])
        computed = step.computed[row].long()
        takes = (computed >= target) & (self._reached[place] == 0)
        behind = step.accepted[row].long() - 1
        for number, states in enumerate(self._states_of(step, row, behind)):
            if len(self._live) <= number:
                shape = (self._room(), *states[0].shape[1:]), (self._room(), *states[1].shape[1:])
                self._live.append((states[0].new_zeros(shape[0]), states[1].new_zeros(shape[1])))
            for live, state in zip(self._live[number], states, strict=True):
                live[place] = state.where(takes.view(-1, 1, 1), live[place])
        self._reached[place] = computed.where(takes, self._reached[place])

    def _on_device(self, numbers: list[list[int]]) -> Tensor:
        """Without waiting for the device."""
        device = self._runner.device
        made = torch.tensor(numbers, pin_memory=device.type == "cuda")
        return made.to(device, non_blocking=True)

    def _states_of(
        self, step: StepStates, row: Tensor, behind: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's states [requests, HV, V * K] and convolution inputs [requests, 1, ...]."""
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        for layer, group in zip(self._layers, self._groups, strict=True):
            slots = step.tables[group][row].long()
            state = layer.state[slots.gather(1, behind[:, None]).flatten()]
            inputs = layer.layer.kv_cache[0][slots[:, 0]]
            if not is_conv_state_dim_first():
                inputs = inputs.transpose(-1, -2)
            width = layer.layer.conv1d.weight.size(-1)
            columns = behind[:, None] + torch.arange(width - 1, device=behind.device)
            columns = columns[:, None].expand(-1, inputs.shape[1], -1)
            yield state.flatten(2), inputs.gather(2, columns).flatten(1)[:, None]

    # Behind a batch.

    def keep(
        self, name: str, requests: Sequence[str], spans: Sequence[tuple[int, int]] = ()
    ) -> dict[str, Any]:
        """Keep the copies of these requests; `spans` are of K/V rows.

        Returns `tokens`: (number of a request, its tokens) of those that have a copy; `unreadable`
        is None.
        """
        reached, places = self._reached.tolist(), self._sample.places
        copied = {i: places[request] for i, request in enumerate(requests) if request in places}
        copied = {i: place for i, place in copied.items() if reached[place]}
        tokens = {i: reached[place] for i, place in copied.items()}
        index, live = list(copied.values()), [state for both in self._live for state in both]
        device = self._runner.device
        there = place_for(sum(state.nbytes for state in live), device, ROOM)
        # A state behind n tokens is the row of position n.
        rows = [(tokens[i], tokens[i] + 1) if i in tokens else (0, 0) for i in range(len(requests))]
        known = torch.ones(len(copied), dtype=torch.bool)
        self._kept[name] = KeptRows(rows, known, [state[index].to(there) for state in live], device)
        return {"unreadable": None, "tokens": list(tokens.items())}

    def compare(self, name: str, pairs: Sequence[KeptPair]) -> dict[str, Any]:
        """Errors of kept states against others after the same tokens: a row is one head's state."""
        for i, other, j, _ in pairs:
            if self._kept[name].spans[i] != self._kept[other].spans[j]:
                raise BenchError.at("states", f"{name!r} and {other!r} are of other tokens", (i, j))
        return super().compare(name, pairs)
