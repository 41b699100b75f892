"""DRAM bytes of a window's cache write and attention kernels, outside an engine.

    python sweeps/studies/dram-kernels/measure.py [--output FILE.csv]

What `sweeps/studies/dram-bytes` measures inside an engine, kernel by kernel: into how many parts
FlashAttention 3 cuts a context, what it and ours leave behind, and which reads are not the
context's. vLLM's kernels and ours run as in a layer of the 3B shape, on 28 layers' caches, with the
QKV outputs freshly written before them and a layer's weights read behind them. Ways take turns in
each round. `page.py` makes README.md of it. Needs a GPU whose counters may be read, and
cupti-python.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from dram_count import captured, dram_bytes, layer_weights, reader
from measured_page import save_measured

from nwor_bench.instruments.cupti_library import run_under_own_cupti
from nwor_bench.instruments.pm_sampling import PmSampler
from nwor_bench.microbench import peers
from nwor_bench.microbench.attention import MAX_SPLITS, AttentionBuffers
from nwor_bench.microbench.cases import Group, Shape, Window, parse_windows
from nwor_bench.microbench.implementation import Call
from nwor_kernels.stage.kernel import stage_kv_cache_triton
from nwor_kernels.verify_attention.kernel import VerifyWorkspace

SHAPE = Shape()
NOTHING = "nothing"

WAYS: dict[str, str] = {
    NOTHING: "the QKV outputs written, the weights read: taken off everywhere else",
    "write": "vLLM's reshape_and_cache_flash of the window's K/V",
    "attend": "FlashAttention 3 as vLLM calls it in a full graph (at most 32 splits)",
    "attend, 1 split": "the same, contexts never split",
    "write, attend": "both, as stock vLLM has them in each layer",
    "write, attend, read": "and the output is read, as the next GEMM does",
    "nwor": "staged by reference: our attention, the window's K/V from the QKV outputs",
    "nwor, read": "and the output is read",
    "first, copy, nwor": "staged by copy: each first token written, drafts copied, our attention "
    "(on the QKV outputs, where an engine's reads the copies)",
    "first, copy, nwor, read": "and the output is read",
}
SMALLEST = (Window(1, 1), 16)
"""A window and context that are next to nothing beside the code of the kernels."""


class Layers:
    """28 layers' caches and activations, and each way to go through them."""

    def __init__(self, window: Window, context: int):
        device = torch.device("cuda", torch.cuda.current_device())
        self.window, self.context = window, context
        group = Group("verify_attention", "bf16", window, context=context)
        self.layers = [AttentionBuffers(group, SHAPE, device) for _ in range(SHAPE.layers)]
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._reads = layer_weights(self._total)
        self._workspace = VerifyWorkspace.create(
            max_requests=window.requests,
            num_heads=SHAPE.heads,
            num_kv_heads=SHAPE.kv_heads,
            head_dim=SHAPE.head_dim,
            max_query_len=window.drafts + 1,
            device=device,
        )

    def calls(self, way: str) -> list[Call]:
        """A window: for each layer its QKV outputs, what the way does, and its weights."""
        found: list[Call] = []
        for layer, weights in zip(self.layers, cycle(self._reads), strict=False):
            # Query, key and value are parts of one output, as a layer's GEMM writes it.
            found += [partial(_fused(layer).fill_, 0.5), *self._between(layer, way), weights]
        return found

    def _between(self, layer: AttentionBuffers, way: str) -> list[Call]:
        steps: dict[str, Callable[[], Call]] = {
            "write": partial(_write, layer),
            "first": partial(_write, layer, most=1),
            "copy": partial(_copy, layer),
            "attend": partial(layer.flash_call, 1 if way.endswith("1 split") else MAX_SPLITS),
            "nwor": partial(layer.our_call, self._workspace, 1 if "copy" in way else 0),
            "read": partial(reader, layer.output, self._total),
        }
        return [steps[step]() for step in way.split(", ") if step in steps]

    def splits(self) -> dict[str, list[int]]:
        """How FlashAttention's scheduler cuts each request: at most 32 ways, or as it likes."""
        requests = self.window.requests
        first = -(-requests // 4) * 4  # the metadata has columns of so many numbers
        return {
            way: self.layers[0].flash_metadata(most)[first : first + requests].tolist()
            for way, most in (("full graphs", MAX_SPLITS), ("eager", 0))
        }


def _fused(layer: AttentionBuffers) -> torch.Tensor:
    """The whole QKV output that query, key and value are views of."""
    fused = layer.query._base
    assert fused is not None
    return fused


def _write(layer: AttentionBuffers, most: int | None = None) -> Call:
    """vLLM's write of the window's K/V to where attention looks; `most` tokens of a request."""
    device, block_size = layer.query.device, SHAPE.block_size
    position = layer.context + torch.arange(layer.rows, device=device)
    slots = layer.table[:, position // block_size].long() * block_size + position % block_size
    slots[:, layer.rows if most is None else most :] = -1  # vLLM's word for: not this one
    halves = torch.split(layer.cache.transpose(1, 2), SHAPE.head_dim, dim=-1)
    write: Callable[..., None] = peers.cuda_write()
    rows = (layer.key, layer.value)
    return partial(write, *rows, *halves, slots.flatten(), "auto", layer.scale, layer.scale)


def _copy(layer: AttentionBuffers) -> Call:
    """Our copy of the window's drafts into a buffer."""
    rows = torch.arange(layer.requests * layer.rows, device=layer.query.device)
    drafts = rows[rows % layer.rows > 0]
    sizes = (drafts.numel(), *layer.key.shape[1:])
    buffers = [layer.key.new_empty(sizes) for _ in range(2)]
    metadata = torch.zeros(2, dtype=torch.int32, device=rows.device)
    return partial(stage_kv_cache_triton, layer.key, layer.value, drafts, *buffers, metadata)


def measure(
    sampler: PmSampler, window: Window, context: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row a way and round: bytes of a window, less what `nothing` moves in that round."""
    layers = Layers(window, context)
    splits = {way: sorted(set(found)) for way, found in layers.splits().items()}
    print(f"{window}, context {context}: splits {splits}", flush=True)
    calls = {way: layers.calls(way) for way in WAYS}  # they own what the graphs read
    graphs = {way: captured(*calls[way]) for way in WAYS}
    rows = []
    for number in range(options.rounds):
        found = {way: dram_bytes(sampler, graphs[way].replay, options.replays) for way in WAYS}
        nothing = found[NOTHING]
        for way, moved in found.items():
            case = {"requests": window.requests, "drafts": window.drafts, "context": context}
            rows.append(
                case
                | {"way": way, "round": number}
                | {"read_mb": (moved.read - nothing.read) / 1e6}
                | {"written_mb": (moved.write - nothing.write) / 1e6}
                | {f"splits, {how}": " ".join(map(str, found)) for how, found in splits.items()}
            )
    return rows


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", default="8x4,64x8")
    parser.add_argument("--context", type=int, default=1050, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("attention.csv"))
    options = parser.parse_args()
    run_under_own_cupti()
    sampler = PmSampler(torch.cuda.current_device())
    cases = [*((window, options.context) for window in parse_windows(options.windows)), SMALLEST]
    try:
        rows = [row for case in cases for row in measure(sampler, *case, options)]
    finally:
        sampler.close()
    save_measured(options.output, pd.DataFrame(rows).round(3))


if __name__ == "__main__":
    main()
