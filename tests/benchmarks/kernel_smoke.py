"""How fast the Triton kernels are on a CUDA device, and whether they wrote what they should.

    PYTHONPATH=.:kernels python tests/benchmarks/kernel_smoke.py [--replays 200]

Times are medians over replays of a CUDA graph. Cold: the graph goes round several sets of
buffers, so that what one call reads is not left in L2 by the one before; warm: one set. vLLM's
own write is measured where its library can be loaded; else torch's index_put stands in alone.
Host times are medians of eager launches. Exits with 1 when a commit wrote anything wrong.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
import triton
from torch import Tensor

from nwor_kernels.commit.plan import CommitPlan
from nwor_kernels.commit.reference import accepted_rows
from nwor_kernels.commit.sources import StagedSources
from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton, acceptance_mask_triton
from nwor_kernels.stage.kernel import stage_kv_cache_triton

LAYERS, QUERY_HEADS, HEADS, DIM, BLOCK_SIZE, BLOCKS, TOKENS, VOCAB = (
    28,
    24,
    8,
    128,
    16,
    1024,
    4,
    128_256,
)
COLD_BYTES = 256 << 20
"""What a round of buffer sets should touch: several times the L2 of any GPU so far."""

Call = Callable[[], object]
Write = Callable[[Tensor, Tensor, Tensor, Tensor], object]


@triton.jit
def _empty_kernel(anything):
    pass


@dataclass
class Windows:
    """Windows of TOKENS rows in every layer's fused QKV output, and the accepted rows alone."""

    keys: list[Tensor]
    values: list[Tensor]
    sources: StagedSources
    slots: Tensor
    num_sampled: Tensor
    accepted: Tensor
    kept_keys: list[Tensor]
    kept_values: list[Tensor]
    kept_slots: Tensor


def make_windows(rows: int, rate: float) -> Windows:
    """About `rate` of each request's rows are accepted."""
    keys, values = [], []
    for _ in range(LAYERS):
        packed = torch.randn(rows, (QUERY_HEADS + 2 * HEADS) * DIM, device="cuda").bfloat16()
        heads = packed.view(rows, QUERY_HEADS + 2 * HEADS, DIM)
        keys.append(heads[:, QUERY_HEADS:-HEADS])
        values.append(heads[:, -HEADS:])
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, device="cuda")[:rows]
    kept = torch.rand(rows // TOKENS, TOKENS, device="cuda") < rate
    num_sampled = kept.sum(1, dtype=torch.int32)
    accepted = accepted_rows(num_sampled, rows, tokens_per_request=TOKENS)
    return Windows(
        keys,
        values,
        StagedSources(keys, values),
        slots,
        num_sampled,
        accepted,
        [key[accepted] for key in keys],
        [value[accepted] for value in values],
        slots[accepted],
    )


def make_caches(dtype: torch.dtype) -> list[Tensor]:
    """Poisoned caches [blocks, heads, block_size, 2 * dim] in vLLM's layout on a GPU."""
    shape = (BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM)
    poison = 0x7F if dtype is torch.uint8 else float("nan")
    return [torch.full(shape, poison, device="cuda", dtype=dtype) for _ in range(LAYERS)]


def us_per_call(calls: list[Call], replays: int) -> float:
    """Microseconds a call: median over replays of one graph that makes all the calls."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for replay in range(replays + 5):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 5:
            times.append(start.elapsed_time(end) * 1000 / len(calls))
    return median(times)


def host_us_per_call(call: Call, calls: int = 300) -> float:
    """Microseconds of host time that an eager launch takes: median over launches."""
    times = []
    for number in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
        if number % 50 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return median(times)


def vllm_op() -> Callable[..., None] | None:
    """vLLM's CUDA write of one layer; None where its library is not here."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(folder).glob("_C*.so")):
            torch.ops.load_library(library)
    try:
        return torch.ops._C_cache_ops.reshape_and_cache_flash
    except AttributeError:
        print("vLLM's write is left out: its CUDA library is not here")
        return None


def stock_write(dtype: torch.dtype, scale: Tensor) -> Write | None:
    """The write as vLLM's FlashAttention backend calls it."""
    reshape_and_cache_flash = vllm_op()
    if reshape_and_cache_flash is None:
        return None
    kind = "fp8" if dtype is torch.uint8 else "auto"

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        to_key, to_value = cache.transpose(1, 2).split(DIM, dim=-1)
        reshape_and_cache_flash(key, value, to_key, to_value, slots, kind, scale, scale)

    return write


def torch_write(dtype: torch.dtype, scale: Tensor) -> Write:
    """The same with torch: one index_put of K and one of V."""

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        if dtype is torch.uint8:
            key, value = (quantize_e4m3(rows, scale).view(dtype) for rows in (key, value))
        cache[block, :, offset, :DIM] = key
        cache[block, :, offset, DIM:] = value

    return write


def print_row(what: str, ours: float, others: dict[str, float]) -> None:
    told = "".join(f"  {name} {us:8.2f} us ({us / ours:5.2f}x)" for name, us in others.items())
    print(f"{what:42s} {ours:8.2f} us{told}", flush=True)


def time_commit(rows: int, rate: float, dtype: torch.dtype, replays: int) -> bool:
    """One launch against one stock write a layer of the same accepted rows; wrote it the same?"""
    fp8 = dtype is torch.uint8
    scale = torch.full((1,), 0.37, device="cuda")
    per_set = LAYERS * rows * (QUERY_HEADS + 2 * HEADS) * DIM * 2
    sets = [make_windows(rows, rate) for _ in range(min(max(COLD_BYTES // per_set, 3), 32))]
    caches, same = make_caches(dtype), make_caches(dtype)
    plan = CommitPlan(caches, *([[scale] * LAYERS] * 2 if fp8 else ()))
    errors = torch.zeros(LAYERS, dtype=torch.int32, device="cuda")

    def commit(w: Windows, **options: object) -> Call:
        return lambda: plan.commit_windows(
            w.sources, w.slots, w.num_sampled, errors, tokens_per_request=TOKENS, **options
        )

    def masked(w: Windows) -> Call:
        return lambda: plan.commit_windows(w.sources, w.slots, None, errors, accepted=w.accepted)

    def per_layer(write: Write, w: Windows) -> Call:
        def write_layers() -> None:
            for layer, cache in enumerate(same):
                write(w.kept_keys[layer], w.kept_values[layer], cache, w.kept_slots)

        return write_layers

    ours = us_per_call([commit(w) for w in sets], replays)
    others = {"warm": us_per_call([commit(sets[0])] * len(sets), replays)}
    others["masked"] = us_per_call([masked(w) for w in sets], replays)
    for tokens in (1, 2, 4, 8):
        calls = [commit(w, tokens_per_program=tokens) for w in sets]
        others[f"tile {tokens}"] = us_per_call(calls, replays)
    writes = {"index_put": torch_write(dtype, scale), "stock": stock_write(dtype, scale)}
    for name, write in writes.items():
        if write:
            others[name] = us_per_call([per_layer(write, w) for w in sets], replays)
    print_row(f"commit {rows} rows, {rate:.1f} accepted, {dtype}", ours, others)
    for cache in (*caches, *same):
        cache.fill_(0x7F if fp8 else float("nan"))
    commit(sets[0])()
    per_layer(writes["stock"] or writes["index_put"], sets[0])()
    as_bytes = (torch.stack(list(map(bytes_of, both))) for both in (caches, same))
    return torch.equal(*as_bytes) and not errors.any()


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def time_stage(rows: int, replays: int) -> None:
    """One layer's stage against one stock write of the same tokens."""
    sets = [make_windows(2 * rows, 1.0) for _ in range(2)]
    one = torch.ones(1, device="cuda")
    caches, index = make_caches(torch.bfloat16), torch.arange(rows, device="cuda") * 2
    buffers = torch.empty(2, LAYERS, rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    metadata = torch.zeros(LAYERS, 2, dtype=torch.int32, device="cuda")
    writes = {
        "index_put": torch_write(torch.bfloat16, one),
        "stock": stock_write(torch.bfloat16, one),
    }
    ours: list[Call] = []
    calls: dict[str, list[Call]] = {name: [] for name, write in writes.items() if write}
    for w in sets:
        for layer in range(LAYERS):
            k, v, slots = w.keys[layer], w.values[layer], w.slots[::2]
            to = (*buffers[:, layer], metadata[layer])
            ours.append(lambda k=k, v=v, to=to: stage_kv_cache_triton(k, v, index, *to))
            same = (k[::2], v[::2], caches[layer], slots.contiguous())
            for name in calls:
                calls[name].append(lambda write=writes[name], same=same: write(*same))
    others = {name: us_per_call(each, replays) for name, each in calls.items()}
    print_row(f"stage {rows} rows of one layer", us_per_call(ours, replays), others)


def time_mask(requests: int, replays: int) -> None:
    """The masks against a kernel that does nothing."""
    drafts = TOKENS
    ids = torch.randint(0, VOCAB, (requests, drafts + 1), device="cuda")
    counts = torch.full((requests,), drafts, dtype=torch.int32, device="cuda")
    sampled = torch.randint(0, drafts + 2, (requests,), dtype=torch.int32, device="cuda")
    mask = torch.empty(requests * drafts, dtype=torch.bool, device="cuda")
    out = torch.empty(requests, dtype=torch.int32, device="cuda")
    masks: dict[str, Call] = {
        "from counts, uneven": lambda: acceptance_mask_from_counts_triton(
            sampled, counts, mask, out
        ),
        "from ids": lambda: acceptance_mask_triton(ids, None, VOCAB, mask, out, drafts),
        "from ids, uneven": lambda: acceptance_mask_triton(ids, counts, VOCAB, mask, out),
        "empty": lambda: _empty_kernel[(1,)](out, num_warps=1),
    }

    def hot() -> None:
        acceptance_mask_from_counts_triton(sampled, None, mask, out, drafts)

    ours = us_per_call([hot] * 50, replays)
    others = {name: us_per_call([call] * 50, replays) for name, call in masks.items()}
    print_row(f"mask {requests} requests, from counts", ours, others)


def time_host() -> None:
    """What a launch costs the host; the hooks add these to every window."""
    w, other, caches = make_windows(32, 0.6), make_windows(32, 0.6), make_caches(torch.bfloat16)
    turns = cycle([(other.keys, other.values), (w.keys, w.values)])
    plan, errors = CommitPlan(caches), torch.zeros(LAYERS, dtype=torch.int32, device="cuda")
    mask = torch.empty(32, dtype=torch.bool, device="cuda")
    out = torch.empty(8, dtype=torch.int32, device="cuda")
    calls: dict[str, Call] = {
        "commit": lambda: plan.commit_windows(
            w.sources, w.slots, w.num_sampled, errors, tokens_per_request=TOKENS
        ),
        "refill, same addresses": lambda: w.sources.refill(w.keys, w.values),
        "refill": lambda: w.sources.refill(*next(turns)),
        "mask": lambda: acceptance_mask_from_counts_triton(w.num_sampled, None, mask, out, TOKENS),
        "mask operator": lambda: torch.ops.nwor.acceptance_mask_from_counts(
            w.num_sampled, None, mask, out, TOKENS
        ),
        "empty": lambda: _empty_kernel[(1,)](out, num_warps=1),
    }
    told = "".join(f"  {name} {host_us_per_call(call):6.1f} us" for name, call in calls.items())
    print(f"host time of an eager launch{told}")


def main() -> None:
    """Time, print, compare what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=200)
    replays = parser.parse_args().replays
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{LAYERS} layers, {HEADS} heads of {DIM}, blocks of {BLOCK_SIZE}; (other / ours)")
    good = True
    for dtype in (torch.bfloat16, torch.uint8):
        for rows in (32, 512):
            for rate in (1.0, 0.5):
                good &= time_commit(rows, rate, dtype, replays)
    for rows in (32, 512):
        time_stage(rows, replays)
    for requests in (8, 64, 512):
        time_mask(requests, replays)
    time_host()
    if not good:
        sys.exit("a commit did not write what the stock write writes")


if __name__ == "__main__":
    main()
