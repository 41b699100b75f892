"""Which states are copied of a batch, and when, on a simulated V2 runner."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nwor_bench.errors import BenchError
from nwor_bench.plugin.observe.state_rows import SAMPLE, Sample, StateRows

DRAFTS = 2
WIDTH, CHANNELS = 4, 3
NAMES = ("net 0", "net 1")
SLOTS = 16


@pytest.mark.parametrize(
    ("most", "requests", "places"),
    [(8, 5, range(5)), (8, 128, range(0, 128, 16)), (3, 9, (0, 4, 8)), (1, 9, (0,))],
)
def test_a_sample_is_spread_over_the_batch(most: int, requests: int, places: Sequence[int]) -> None:
    sample = Sample(most)
    for number in range(requests):
        sample.add(str(number), 10 + number)
    assert list(sample.places) == [str(n) for n in places]
    assert len(set(sample.places.values())) == len(places)
    assert set(sample.places.values()) <= set(range(most))
    assert sample.targets == {name: 10 + int(name) for name in sample.places}


def test_a_resumed_request_keeps_its_place() -> None:
    sample = Sample(2)
    assert [sample.add(name, 5) for name in ("a", "b", "a")] == [0, 1, None]
    assert sample.add("c", 5) == 1  # in stead of b
    assert sample.add("b", 5) is None
    assert list(sample.places) == ["a", "c"]


class Runner:
    """A V2 runner of two gated delta nets, each in a KV-cache group of its own."""

    device = torch.device("cpu")
    first = 0
    """Number in the name of a batch's first request."""

    def __init__(self) -> None:
        groups = [SimpleNamespace(layer_names=[name]) for name in NAMES]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        speculative = SimpleNamespace(num_speculative_tokens=DRAFTS)
        self.vllm_config = SimpleNamespace(speculative_config=speculative)
        self.model_state = SimpleNamespace(num_accepted_tokens_gpu=torch.ones(4, dtype=torch.int32))
        # Requests are 0 and 1; their tables differ by group.
        self.tables = tuple(
            torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32) + 6 * group for group in (0, 1)
        )
        weight = SimpleNamespace(weight=torch.zeros(CHANNELS, 1, WIDTH))
        self.layers = []
        for name in NAMES:
            kept = torch.randn(SLOTS, WIDTH - 1 + DRAFTS, CHANNELS)
            net = SimpleNamespace(kv_cache=[kept], conv1d=weight)
            state = torch.randn(SLOTS, 2, 4, 4)
            own = {"state_bytes": 128, "cache_group": len(self.layers)}
            self.layers.append(SimpleNamespace(name=name, layer=net, state=state, **own))

    def execute_model(self, scheduler_output: Any) -> None:
        """The test calls `prepare_attn` itself."""

    def prepare_attn(self, input_batch: Any) -> Any:
        """Block tables, and no slots."""
        return self.tables, None

    def names(self, requests: int) -> list[str]:
        return [f"{self.first + n}-x" for n in range(requests)]

    def starts(self, *prompts: int, max_tokens: int) -> None:
        params = SimpleNamespace(max_tokens=max_tokens)
        new = [
            SimpleNamespace(req_id=name, prompt_token_ids=[7] * prompt, sampling_params=params)
            for name, prompt in zip(self.names(len(prompts)), prompts, strict=True)
        ]
        self.execute_model(SimpleNamespace(scheduled_new_reqs=new))

    def step(self, computed: list[int], accepted: list[int], optimistic: int = 0) -> None:
        """A window of every request begins; the host may count too many tokens."""
        requests = len(computed)
        self.model_state.num_accepted_tokens_gpu[:requests] = torch.tensor(accepted).int()
        lengths = torch.full((requests,), DRAFTS + 1)
        batch = SimpleNamespace(
            req_ids=self.names(requests),
            num_reqs=requests,
            idx_mapping=torch.arange(requests),
            query_start_loc=torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]),
            seq_lens=torch.tensor(computed) + lengths,
            num_computed_tokens_np=np.array(computed) + optimistic,
        )
        self.prepare_attn(batch)


@pytest.fixture
def runner() -> Runner:
    torch.manual_seed(3)
    return Runner()


@pytest.fixture
def rows(runner: Runner) -> StateRows:
    states = SimpleNamespace(layers=runner.layers)
    found = StateRows(SimpleNamespace(name="V2", runner=runner, states=states))  # type: ignore[arg-type]
    found.watch(True)
    return found


def taken_and_changed(runner: Runner) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's states and convolution inputs, before they change."""
    found = [(layer.state.clone(), layer.layer.kv_cache[0].clone()) for layer in runner.layers]
    for layer in runner.layers:
        layer.state.add_(1)
        layer.layer.kv_cache[0].add_(1)
    return found


@pytest.mark.slow  # it imports vLLM
def test_states_are_copied_once_from_where_vllm_reads_them(runner: Runner, rows: StateRows) -> None:
    runner.starts(5, 4, max_tokens=10)  # the last token has no state: 13 and 12 at most
    # 13 - 1 - DRAFTS = 11 and 10 tokens are enough: request 1 has them at once.
    runner.step([10, 10], [1, 2], optimistic=3)
    first = taken_and_changed(runner)
    runner.step([12, 12], [3, 2], optimistic=3)
    second = taken_and_changed(runner)
    runner.step([13, 13], [1, 1])
    assert rows.keep("cell", ["0", "1", "elsewhere"])["tokens"] == [(0, 12), (1, 10)]
    kept = rows._kept["cell"].tensors
    for number in range(2):
        own = 6 * number
        state, inputs = kept[2 * number : 2 * number + 2]
        assert torch.equal(state[0], second[number][0][3 + own].flatten(1))
        assert torch.equal(state[1], first[number][0][5 + own].flatten(1))
        assert torch.equal(inputs[0, 0].view(CHANNELS, 3).T, second[number][1][1 + own, 2:5])
        assert torch.equal(inputs[1, 0].view(CHANNELS, 3).T, first[number][1][4 + own, 1:4])


@pytest.mark.slow
def test_kept_states_are_compared_by_request(runner: Runner, rows: StateRows) -> None:
    for name in ("off", "cell"):
        rows.watch(True)  # another batch
        runner.starts(5, 4, max_tokens=10)
        runner.step([11, 10], [1, 1])
        rows.keep(name, ["0", "1"])
        runner.layers[1].state[4 + 6, 1] *= 2
    found = rows.compare("cell", [(0, "off", 0, 0), (1, "off", 1, 0)])["errors"]
    assert [(each["layer"], each["what"][:4], each["rows"]) for each in found] == [
        (0, "recu", 4), (0, "conv", 2), (1, "recu", 4), (1, "conv", 2)
    ]  # fmt: skip
    assert [each["differing"] for each in found] == [0, 0, 1, 0]
    assert found[2]["place"] == {"request": 1, "position": 10, "head": 1}
    assert found[2]["largest"] > 0.5
    one = rows.compare("cell", [(0, "off", 0, 0)])
    assert [each["differing"] for each in one["errors"]] == [0] * 4
    with pytest.raises(BenchError, match="of other tokens"):
        rows.compare("cell", [(0, "off", 1, 0)])


@pytest.mark.slow
def test_a_request_that_ends_early_is_not_copied(runner: Runner, rows: StateRows) -> None:
    runner.starts(5, 4, max_tokens=10)
    runner.step([10, 9], [1, 1], optimistic=4)
    assert rows.keep("cell", ["0", "1"])["tokens"] == []


def test_nothing_stays_wrapped(runner: Runner, rows: StateRows) -> None:
    assert "prepare_attn" in vars(runner)
    rows.watch(False)
    assert not {"prepare_attn", "execute_model"} & set(vars(runner))


def test_no_more_requests_are_copied_than_have_room(runner: Runner, rows: StateRows) -> None:
    assert rows._room() == SAMPLE
    for layer in runner.layers:
        layer.state_bytes = 100 << 20
    assert rows._room() == 2
    runner.layers[0].state_bytes = 1 << 40
    assert rows._room() == 1


@pytest.mark.slow
def test_each_batch_has_a_sample_of_its_own(runner: Runner, rows: StateRows) -> None:
    runner.layers[0].state_bytes = 1 << 40
    for runner.first in (0, 2):
        rows.watch(True)
        runner.starts(5, 4, max_tokens=10)
        runner.step([11, 10], [1, 1])
        assert rows.keep("cell", [str(runner.first + n) for n in (0, 1)])["tokens"] == [(0, 11)]
