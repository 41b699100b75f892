"""A cache's blocks are summed a few at a time: the sums are those of the whole."""

import torch

from nwor_bench.plugin.observe import layer_checks


def test_blocks_summed_in_parts_are_the_sums_of_their_elements(monkeypatch) -> None:
    cache = torch.randn(11, 2, 4, 6, dtype=torch.bfloat16)[:, :, :, :4]  # strided, as in a page
    monkeypatch.setattr(layer_checks, "SUMMED_AT_ONCE", 3 * cache[0].numel())
    expected = [sum(block.flatten().tolist()) for block in cache.contiguous().view(torch.int16)]
    assert layer_checks._sums(cache).tolist() == expected
