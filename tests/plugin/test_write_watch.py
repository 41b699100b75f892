"""The watch over staged slots: what is written early, unevenly, or beyond what was accepted."""

import pytest
import torch

from nwor_bench.plugin.layers import LayerCache
from nwor_bench.plugin.observe.write_watch import MARK, MARK_IN_E4M3, WriteWatch, _is_draft
from nwor_bench.plugin.runner_v1.staging import StagingBuffers, write_kv_cache
from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch
from nwor_bench.plugin.window import Window, WindowBatch

LAYERS = 3
ROWS, SLOTS = torch.tensor([1, 2, 4]), torch.tensor([9, 10, 14])
DIRECT = torch.tensor([8, -1, -1, 13, -1])


class Watched:
    """A window of three drafts (two requests) over small caches, and the watch over it."""

    def __init__(self) -> None:
        self.caches = [torch.zeros(5, 2, 4, 8) for _ in range(LAYERS)]
        layers = [LayerCache(f"layer{i}", c, 4, torch.float32) for i, c in enumerate(self.caches)]
        self.buffers = StagingBuffers(layers, 4)
        self.window = Window(self.buffers)
        self.watch = WriteWatch(self.window, self.buffers.layers)
        self.key, self.value = torch.randn(2, 5, 2, 4).unbind()
        self.watch.switch(True)

    def stage(self, slots: torch.Tensor = SLOTS) -> None:
        self.window.begin(WindowBatch((2, 1), ROWS, slots, DIRECT))
        for layer in range(LAYERS):
            assert self.window.stage(layer, self.key, self.value)

    def commit(self, *accepted: bool) -> None:
        assert self.window.accept(torch.tensor(accepted))
        assert self.window.commit()

    def seen(self) -> tuple[int, ...]:
        """Windows, those that were early and uneven, drafts written, and those without a slot."""
        self.window.close()
        seen = self.watch.switch(False)
        return tuple(seen[n] for n in ("windows", "early", "uneven", "written", "without_slot"))


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_sound_window_writes_what_it_accepted(watched: Watched) -> None:
    watched.stage()
    watched.commit(True, False, True)
    assert watched.seen() == (1, 0, 0, 2, 0)
    cache = watched.caches[0]
    assert (cache[10 // 4, :, 10 % 4] == MARK).all()  # rejected: the next window overwrites it


def test_a_layer_that_was_left_out_is_uneven(watched: Watched) -> None:
    watched.stage()
    kept = watched.caches[1].clone()
    watched.commit(True, True, False)
    watched.caches[1].copy_(kept)
    assert watched.seen() == (1, 0, 2, 2, 0)


def test_a_draft_without_a_slot_is_told_apart(watched: Watched) -> None:
    watched.stage(torch.tensor([9, -1, 14]))
    watched.buffers.metadata[:, 0] = 2  # staging counts rows, the commit those with a slot
    watched.commit(True, True, True)
    assert watched.seen() == (1, 0, 0, 2, 1)


def test_a_capture_has_no_slots_to_mark(watched: Watched) -> None:
    watched.window.begin(WindowBatch((2, 1), ROWS, SLOTS, None), repeats=True)
    watched.window.forget()
    assert not (watched.caches[0] == MARK).any()


def test_a_controls_drafts_are_not_watched(watched: Watched) -> None:
    """They are written at once and never committed, in an interleaved batch beside staged ones."""
    batch = WindowBatch((2, 1), ROWS, SLOTS, torch.tensor([8, 9, 10, 13, 14]))
    watched.window.begin(batch, control=True)
    for layer in range(LAYERS):
        assert watched.window.stage(layer, watched.key, watched.value)
        write_kv_cache(watched.key[ROWS], watched.value[ROWS], watched.caches[layer], SLOTS)
    watched.window.end_control()
    assert set(watched.seen()) == {0}


def test_padding_and_the_certain_token_are_no_drafts(watched: Watched) -> None:
    slots = torch.tensor([8, 9, 10, -1, -1, -1])
    batch = GpuWindowBatch((2, 2), torch.arange(6), slots, None, tokens_per_request=3, certain=1)
    assert _is_draft(batch).tolist() == [False, True, True, False, True, True]
    watched.watch._mark(batch)
    marked = {n for n in range(20) if (watched.caches[0][n // 4, :, n % 4] == MARK).all()}
    assert marked == {8, 9, 10}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mark_is_exact_in_every_dtype_of_a_cache(dtype: torch.dtype) -> None:
    assert torch.tensor(MARK, dtype=dtype).item() == MARK
    byte = torch.tensor([MARK_IN_E4M3], dtype=torch.uint8)
    assert byte.view(torch.float8_e4m3fn).float().item() == MARK
