"""One window's life by example; `test_window_machine.py` has any sequence of calls and faults."""

import logging

import pytest
import torch
from window_model import ModelEngine

from nwor_bench.plugin.window import Outcome, State, WindowError

LAYERS = 3


def open_window(num_draft_tokens=(2, 0, 1)):
    engine = ModelEngine(LAYERS)
    engine.window.begin(engine.batch(num_draft_tokens))
    return engine


def staged_window(num_draft_tokens=(2, 0, 1)):
    engine = open_window(num_draft_tokens)
    assert all(engine.forward(layer) for layer in range(LAYERS))
    return engine


def test_a_window_that_goes_well():
    engine = staged_window()
    assert engine.window.accept(torch.tensor([True, False, True]))
    assert engine.window.commit()
    assert engine.window.close() == Outcome(3, None)
    first, _, last = engine.slots
    for layer in range(LAYERS):
        everything = engine.expected(layer)
        assert engine.in_cache(layer) == {slot: everything[slot] for slot in (first, last)}


def test_the_faulty_layer_is_left_to_its_attention():
    engine = open_window()
    engine.forward(0)
    engine.staging.stage_faults.append("overflow")
    assert not engine.window.stage(1, engine.kv(1), engine.kv(1))
    assert engine.in_cache(0) == engine.expected(0)
    assert engine.in_cache(1) == {}  # whatever a failed copy left must not be written


def test_a_fault_is_logged_with_its_traceback(caplog):
    engine = open_window()
    engine.staging.stage_faults.append(RuntimeError("the disk is on fire"))
    with caplog.at_level(logging.ERROR, logger="vllm.nwor_bench"):
        engine.forward(0)
    assert "the disk is on fire" in caplog.text
    assert "Traceback" in caplog.text


def test_an_interrupt_is_no_fallback():
    engine = open_window()
    engine.staging.stage_faults.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.forward(0)


def test_a_layer_left_out_of_the_forward_pass_is_no_window_to_commit():
    engine = open_window()
    engine.forward(0)
    engine.forward(2)
    assert not engine.window.accept(torch.tensor([True, True, True]))
    assert engine.window.close().fallback_reason == "accept:layer_not_staged"
    assert engine.in_cache(0) == engine.expected(0)
    assert engine.in_cache(1) == {}


def test_a_direct_write_that_fails_is_not_swallowed():
    engine = staged_window()

    def broken(layers, slots):
        raise OSError("no cache")

    engine.staging.write_directly = broken
    with pytest.raises(OSError, match="no cache"):
        engine.window.abort("why")
    assert engine.window.state is State.OPEN


def test_an_error_of_order_names_the_call_and_the_state():
    engine = open_window()
    with pytest.raises(WindowError, match=r"commit\(\) while the window is open"):
        engine.window.commit()
    with pytest.raises(WindowError, match=r"begin\(\) while a window is open"):
        engine.window.begin(engine.window.batch)


def test_a_batch_totals_its_drafts():
    engine = ModelEngine(1)
    assert engine.batch((2, 0, 3)).total == 5
    assert engine.batch(()).total == 0
