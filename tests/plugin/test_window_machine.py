"""A window under any sequence of calls and faults: the cache ends up valid."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from window_model import ModelEngine

from nwor_bench.plugin.window import State, WindowError

FAULTS = st.sampled_from(["overflow", RuntimeError("fault"), MemoryError("fault")])


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

    def refused(self, call, *arguments):
        """Out of order: it must raise and change nothing."""
        cache = [dict(layer) for layer in self.engine.staging.cache]
        state = self.engine.window.state
        try:
            call(*arguments)
        except WindowError:
            pass
        else:
            raise AssertionError(f"{call.__name__}() while {self.state} was not refused")
        assert self.engine.window.state is state
        assert self.engine.staging.cache == cache

    def falls_back(self, reason):
        self.state = "direct"
        self.reason = reason

    @rule(drafts=st.lists(st.integers(0, 3), max_size=3))
    def begin(self, drafts):
        if self.state != "idle":
            batch = self.engine.window.batch
            self.refused(self.engine.window.begin, batch)
            return
        self.engine.window.begin(self.engine.batch(tuple(drafts)))
        self.state = "open"

    @precondition(lambda self: self.state in ("open", "direct"))
    @rule(data=st.data(), fault=st.one_of(st.none(), st.none(), st.none(), FAULTS))
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
            self.falls_back(f"stage:{fault if isinstance(fault, str) else type(fault).__name__}")
        else:
            assert taken
            self.staged.add(layer)

    @precondition(lambda self: self.state != "open")
    @rule()
    def stage_out_of_order(self):
        kv = torch.zeros(1)
        self.refused(self.engine.window.stage, 0, kv, kv)

    @rule(data=st.data(), right_shape=st.integers(0, 5).map(bool))
    def accept(self, data, right_shape):
        count = len(self.engine.slots) + (not right_shape)
        mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        arguments = torch.tensor(mask, dtype=torch.bool), sum(mask)
        if self.state == "direct":
            assert not self.engine.window.accept(*arguments)
        elif self.state != "open":
            self.refused(self.engine.window.accept, *arguments)
        elif len(self.staged) < self.engine.staging.num_layers:
            assert not self.engine.window.accept(*arguments)
            self.falls_back("accept:layer_not_staged")
        elif not right_shape:
            assert not self.engine.window.accept(*arguments)
            self.falls_back("accept:mask_shape")
        else:
            assert self.engine.window.accept(*arguments)
            self.mask = mask
            self.state = "accepted"

    @rule(data=st.data(), fault=st.one_of(st.none(), st.none(), FAULTS))
    def commit(self, data, fault):
        if self.state == "direct":
            assert not self.engine.window.commit()
        elif self.state != "accepted":
            self.refused(self.engine.window.commit)
        elif fault is None:
            assert self.engine.window.commit()
            self.state = "committed"
        else:
            staging = self.engine.staging
            staging.commit_fault = fault
            staging.layers_before_commit_fault = data.draw(st.integers(0, staging.num_layers))
            assert not self.engine.window.commit()
            self.falls_back(f"commit:{fault if isinstance(fault, str) else type(fault).__name__}")

    @rule(times=st.integers(1, 2))
    def abort(self, times):
        if self.state == "committed":
            self.refused(self.engine.window.abort, "too_late")
            return
        before = self.engine.staging.direct_writes
        for _ in range(times):
            self.engine.window.abort("asked_to")
        if self.state in ("open", "accepted"):
            assert self.engine.staging.direct_writes == before + 1
            self.falls_back("asked_to")
        else:
            assert self.engine.staging.direct_writes == before

    @rule()
    def close(self):
        if self.state not in ("committed", "direct"):
            self.refused(self.engine.window.close)
            return
        outcome = self.engine.window.close()
        assert outcome.staged_tokens == outcome.committed_tokens + outcome.rejected_tokens
        if self.state == "committed":
            assert outcome.staged_tokens == len(self.engine.slots)
            assert outcome.committed_tokens == sum(self.mask)
            assert outcome.fallback_reason is None
        else:
            assert (outcome.staged_tokens, outcome.committed_tokens) == (0, 0)
            assert outcome.fallback_reason == self.reason
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
TestWindowMachine.settings = settings(deadline=None, max_examples=150, stateful_step_count=25)
