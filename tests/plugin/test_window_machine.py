"""A window under any sequence of calls and faults: the cache ends up valid."""

import logging
from unittest.mock import Mock

import pytest
import torch
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from window_model import ModelEngine

from nwor_bench.plugin.window import State, WindowError


@pytest.fixture
def engine():
    """A window of three layers that is open."""
    made = ModelEngine(3)
    made.window.begin(made.batch((2, 0, 1)))
    return made


def test_a_fault_is_logged_with_its_traceback(engine, caplog):
    engine.staging.stage_faults.append(RuntimeError("the disk is on fire"))
    with caplog.at_level(logging.ERROR, logger="vllm.nwor_bench"):
        engine.forward(0)
    assert "the disk is on fire" in caplog.text
    assert "Traceback" in caplog.text


def test_an_interrupt_is_no_fallback(engine):
    engine.staging.stage_faults.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.forward(0)


def test_a_direct_write_that_fails_is_not_swallowed(engine):
    assert all(engine.forward(layer) for layer in range(3))
    engine.staging.write_directly = Mock(side_effect=OSError("no cache"))
    with pytest.raises(OSError, match="no cache"):
        engine.window.abort("why")
    assert engine.window.state is State.OPEN


def test_an_error_of_order_names_the_call_and_the_state(engine):
    with pytest.raises(WindowError, match=r"commit\(\) while the window is open"):
        engine.window.commit()
    with pytest.raises(WindowError, match=r"begin\(\) while a window is open"):
        engine.window.begin(engine.window.batch)


FAULTS = ["overflow", RuntimeError("fault"), MemoryError("fault")]

ALLOWED = {
    "begin": {"idle"},
    "stage": {"open"},
    "accept": {"open", "direct"},
    "commit": {"accepted", "direct"},
    "abort": {"idle", "open", "accepted", "direct"},
    "withdraw": {"committed", "direct"},
    "close": {"committed", "direct"},
}
"""The states in which each call is in order."""


def name_of(fault):
    return fault if isinstance(fault, str) else type(fault).__name__


def in_order(call):
    return precondition(lambda machine: machine.state in ALLOWED[call])


class WindowMachine(RuleBasedStateMachine):
    """Calls a window in any order and keeps its own account of what must hold."""

    @initialize(num_layers=st.integers(1, 3))
    def start(self, num_layers):
        self.engine = ModelEngine(num_layers)
        self.state = "idle"
        self.forget()
        self.settled = [{} for _ in range(num_layers)]

    def forget(self):
        self.staged: set[int] = set()  # layers whose drafts were taken by the window
        self.ran: set[int] = set()  # layers whose attention has run
        self.mask: list[bool] = []
        self.reason = None

    @rule(data=st.data())
    def out_of_order(self, data):
        """Any call that does not belong here must raise and change nothing."""
        window, kv, mask = self.engine.window, torch.zeros(1), torch.ones(1).bool()
        arguments = {
            "begin": (window.batch,),
            "stage": (0, kv, kv),
            "accept": (mask,),
            "abort": ("too late",),
            "withdraw": ("too early",),
        }
        name = data.draw(st.sampled_from([c for c in ALLOWED if self.state not in ALLOWED[c]]))
        cache, state = [dict(layer) for layer in self.engine.staging.cache], window.state
        with pytest.raises(WindowError):
            getattr(window, name)(*arguments.get(name, ()))
        assert window.state is state
        assert self.engine.staging.cache == cache

    def falls_back(self, reason):
        self.state = "direct"
        self.reason = reason

    @in_order("begin")
    @rule(drafts=st.lists(st.integers(0, 3), max_size=3))
    def begin(self, drafts):
        self.engine.window.begin(self.engine.batch(tuple(drafts)))
        self.state = "open"

    @precondition(lambda self: self.state in ("open", "direct"))
    @rule(data=st.data(), fault=st.sampled_from([None] * 4 + FAULTS))
    def forward(self, data, fault):
        """Attention of one layer; most often one that has not run yet."""
        layers = set(range(self.engine.staging.num_layers))
        fresh = sorted(layers - self.ran)
        layer = data.draw(st.sampled_from(fresh or sorted(layers)))
        if data.draw(st.integers(0, 9)) == 0:
            layer = data.draw(st.sampled_from(sorted(layers)))
        self.run_layer(layer, fault)

    @precondition(lambda self: self.state in ("open", "direct"))
    @rule()
    def forward_all(self):
        """The rest of a forward pass without a fault."""
        for layer in range(self.engine.staging.num_layers):
            if layer not in self.ran:
                self.run_layer(layer, None)

    def run_layer(self, layer, fault):
        if self.state == "open" and layer not in self.staged and fault is not None:
            self.engine.staging.stage_faults.append(fault)
        taken = self.engine.forward(layer)
        self.ran.add(layer)
        if self.state == "direct":
            assert not taken
        elif layer in self.staged:
            assert not taken
            self.falls_back("stage:layer_staged_twice")
        elif fault is not None:
            assert not taken
            self.falls_back(f"stage:{name_of(fault)}")
        else:
            assert taken
            self.staged.add(layer)

    @in_order("begin")
    @rule(data=st.data(), drafts=st.lists(st.integers(0, 3), max_size=3), upto=st.integers(0, 2))
    def most_of_a_window(self, data, drafts, upto):
        """A good window as far as its forward pass, its mask or its commit, to go on from."""
        self.begin(drafts)
        self.forward_all()
        if upto > 0:
            self.take_mask(self.draw_mask(data, len(self.engine.slots)))
        if upto > 1:
            self.write_accepted(None, 0)

    @in_order("accept")
    @rule(data=st.data(), surplus=st.sampled_from([0, 0, 0, 1]))
    def accept(self, data, surplus):
        self.take_mask(self.draw_mask(data, len(self.engine.slots) + surplus))

    def draw_mask(self, data, count):
        return data.draw(st.lists(st.booleans(), min_size=count, max_size=count))

    def take_mask(self, mask):
        accepted = torch.tensor(mask, dtype=torch.bool)
        taken = self.engine.window.accept(accepted)
        if self.state == "direct":
            assert not taken
        elif len(self.staged) < self.engine.staging.num_layers:
            assert not taken
            self.falls_back("accept:layer_not_staged")
        elif len(mask) != len(self.engine.slots):
            assert not taken
            self.falls_back("accept:mask_shape")
        else:
            assert taken
            self.mask, self.state = mask, "accepted"

    @in_order("commit")
    @rule(data=st.data(), fault=st.sampled_from([None] * 2 + FAULTS))
    def commit(self, data, fault):
        layers_done = data.draw(st.integers(0, self.engine.staging.num_layers))
        self.write_accepted(fault, layers_done)

    def write_accepted(self, fault, layers_done):
        staging = self.engine.staging
        if self.state == "accepted":
            staging.commit_fault, staging.layers_before_commit_fault = fault, layers_done
        committed = self.engine.window.commit()
        assert committed is (self.state == "accepted" and fault is None)
        if committed:
            self.state = "committed"
        elif self.state == "accepted":
            self.falls_back(f"commit:{name_of(fault)}")

    @in_order("abort")
    @rule(times=st.integers(1, 2))
    def abort(self, times):
        before = self.engine.staging.direct_writes
        for _ in range(times):
            self.engine.window.abort("asked_to")
        if self.state in ("open", "accepted"):
            assert self.engine.staging.direct_writes == before + 1
            self.falls_back("asked_to")
        else:
            assert self.engine.staging.direct_writes == before

    @in_order("withdraw")
    @rule()
    def withdraw(self):
        """Another rank fell back: the cache must hold every draft, the rejected ones too."""
        before = self.engine.staging.direct_writes
        self.engine.window.withdraw("rank_1:stage:fault")
        assert self.engine.staging.direct_writes == before + (self.state == "committed")
        self.falls_back("rank_1:stage:fault")

    @in_order("close")
    @rule()
    def close(self):
        outcome = self.engine.window.close()
        committed = self.state == "committed"
        assert outcome.staged_tokens == (len(self.engine.slots) if committed else 0)
        assert outcome.fallback_reason == (None if committed else self.reason)
        for layer in self.ran:
            self.settled[layer].update(self.must_hold(layer))
        self.state = "idle"
        self.forget()
        self.engine.slots = []

    def must_hold(self, layer):
        """The window's entries in a layer's cache once it is decided."""
        written = self.engine.expected(layer)
        if self.state == "committed":
            pairs = zip(self.engine.slots, self.mask, strict=True)
            return {slot: written[slot] for slot, accepted in pairs if accepted}
        return written

    @invariant()
    def the_window_agrees_on_where_it_stands(self):
        window = self.engine.window
        assert window.state is State(self.state)
        assert window.is_staging == (self.state == "open")
        assert (window.batch is None) == (self.state == "idle")
        assert window.fallback_reason == (self.reason if self.state == "direct" else None)

    @invariant()
    def the_cache_is_valid(self):
        for layer in range(self.engine.staging.num_layers):
            found = self.engine.in_cache(layer)
            if self.state in ("open", "accepted"):
                assert found == {}  # nothing of the window is written before it is decided
            elif self.state in ("committed", "direct"):
                assert found == (self.must_hold(layer) if layer in self.ran else {})

    @invariant()
    def earlier_windows_stay(self):
        for layer, entries in enumerate(self.settled):
            assert entries.items() <= self.engine.staging.cache[layer].items()


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(examples(150), stateful_step_count=40)
