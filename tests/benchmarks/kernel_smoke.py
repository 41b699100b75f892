"""The Triton kernels on a CUDA device: right against the references, and how fast.

    PYTHONPATH=.:kernels python tests/benchmarks/kernel_smoke.py [--replays 200]

Times are medians over replays of a CUDA graph that goes round several sets of buffers, so that
what one call reads is not left in L2 by the one before. vLLM's own write is measured where vLLM
can be imported; else torch's index_put stands in alone. Exits with 1 when a result is wrong.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import triton
from torch import Tensor

from nwor_kernels.commit.kernel import CommitPlan
from nwor_kernels.commit.reference import commit_staged_kv_cache_reference
from nwor_kernels.mask.kernel import acceptance_mask_triton
from nwor_kernels.mask.reference import acceptance_mask_reference
from nwor_kernels.stage.kernel import stage_kv_cache_triton
from nwor_kernels.stage.reference import stage_kv_cache_reference

LAYERS, HEADS, DIM, BLOCK_SIZE, BLOCKS, DRAFTS, VOCAB = 28, 8, 128, 16, 1024, 4, 128_256
COLD_BYTES = 256 << 20
"""What a round of buffer sets should touch: several times the L2 of any GPU so far."""

Call = Callable[[], object]


@triton.jit
def _empty_kernel(anything):
    pass


@dataclass
class Window:
    """A staged window of `rows` drafts over all layers, and what a stock write of it needs."""

    key: Tensor
    value: Tensor
    slots: Tensor
    accepted: Tensor
    num_accepted: Tensor
    draft_request: Tensor
    draft_index: Tensor
    metadata: Tensor
    kept_key: Tensor
    kept_value: Tensor
    kept_slots: Tensor


def make_window(rows: int, rate: float) -> Window:
    """Requests of DRAFTS drafts each; about `rate` of each request's drafts are accepted."""
    shape = (LAYERS, rows, HEADS, DIM)
    key, value = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, device="cuda")[:rows]
    requests = rows // DRAFTS
    counts = (torch.rand(requests, DRAFTS, device="cuda") < rate).sum(1, dtype=torch.int32)
    row = torch.arange(rows, device="cuda", dtype=torch.int32)
    request, index = row // DRAFTS, row % DRAFTS
    accepted = index < counts[request]
    metadata = torch.tensor([[rows, 0]] * LAYERS, dtype=torch.int32, device="cuda")
    kept = (key[:, accepted].contiguous(), value[:, accepted].contiguous(), slots[accepted])
    return Window(key, value, slots, accepted, counts, request, index, metadata, *kept)


def make_caches() -> list[Tensor]:
    """NaN caches [blocks, heads, block_size, 2 * dim] in vLLM's layout on a GPU."""
    shape = (BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM)
    return [
        torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)
    ]


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


def stock_write() -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    """vLLM's write of one layer as its FlashAttention backend calls it; None without vLLM."""
    try:
        from vllm._custom_ops import reshape_and_cache_flash

        torch.ops._C_cache_ops.reshape_and_cache_flash  # noqa: B018, a CPU build has none
    except (ImportError, AttributeError) as error:
        print(f"vLLM's write is left out: {error}")
        return None
    one = torch.ones(1, device="cuda")

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        to_key, to_value = cache.transpose(1, 2).split(DIM, dim=-1)
        reshape_and_cache_flash(key, value, to_key, to_value, slots, "auto", one, one)

    return write


def torch_write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """The same with torch: one index_put of K and one of V."""
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    cache[block, :, offset, :DIM] = key
    cache[block, :, offset, DIM:] = value


def check_commit() -> bool:
    """Both forms of commit, dtypes, dims, block sizes and both layouts against the reference."""
    good, window = True, make_window(512, 0.6)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim, block_size, nhd in ((64, 16, 0), (96, 32, 1), (128, 64, 0), (256, 128, 1)):
            for rows in (1, 31, 512):
                caches = []
                key, value = (
                    torch.randn(3, 512, 2, dim, device="cuda").to(dtype) for _ in range(2)
                )
                for _ in range(3):
                    shape = (600 // block_size + 1, 2, block_size, 2 * dim)
                    if nhd:
                        shape = (shape[0], block_size, 2, 2 * dim)
                    cache = torch.full(shape, float("nan"), device="cuda", dtype=dtype)
                    caches.append(cache.transpose(1, 2) if nhd else cache)
                slots = torch.randperm(600, device="cuda")[:rows]
                slots[::7] = -1
                metadata = torch.zeros(3, 2, dtype=torch.int32, device="cuda")
                metadata[:, 0] = (slots >= 0).sum()
                expected = [cache.cpu() for cache in caches]
                accepted = window.accepted[:rows]
                commit_staged_kv_cache_reference(
                    key.cpu(), value.cpu(), expected, slots.cpu(), accepted.cpu(), metadata.cpu()
                )
                masked, counted = (list(map(torch.clone, caches)) for _ in range(2))
                CommitPlan(masked).commit(key, value, slots, accepted, metadata)
                CommitPlan(counted).commit_counts(
                    key,
                    value,
                    slots,
                    window.num_accepted,
                    window.draft_request[:rows],
                    window.draft_index[:rows],
                    metadata,
                )
                for got in (masked, counted):
                    good &= all(map(same, got, expected))
                good &= not metadata[:, 1].any()
    return good


def check_stage() -> bool:
    """Stage against the reference, sound windows and out-of-range rows."""
    good = True
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for dim in (64, 96, 128, 256):
            for rows in (1, 32, 512):
                packed = torch.randn(600, 3 * HEADS * dim, device="cuda").to(dtype)
                key, value = (
                    packed[:, i * HEADS * dim : (i + 1) * HEADS * dim].view(600, HEADS, dim)
                    for i in (1, 2)
                )
                for bad in (0, 1):
                    index = torch.randint(-1, 600, (rows,), device="cuda")
                    index[-1] += 601 * bad
                    got = torch.full((2, rows, HEADS, dim), float("nan"), device="cuda").to(dtype)
                    metadata = torch.full((2,), 77, dtype=torch.int32, device="cuda")
                    expected, expected_metadata = got.cpu(), metadata.cpu()
                    stage_kv_cache_triton(key, value, index, got[0], got[1], metadata)
                    stage_kv_cache_reference(
                        key.cpu(), value.cpu(), index.cpu(), *expected, expected_metadata
                    )
                    good &= same(got, expected) and same(metadata, expected_metadata)
    return good


def check_mask() -> bool:
    """Mask against the reference."""
    good = True
    for requests, width in ((1, 2), (8, 5), (512, 5), (512, 33)):
        ids, drafts = sampled_ids(requests, width)
        accepted = torch.ones(requests * width + 9, dtype=torch.bool, device="cuda")
        counts = torch.full((requests,), -7, dtype=torch.int32, device="cuda")
        expected = accepted.cpu(), counts.cpu()
        acceptance_mask_triton(ids, drafts, VOCAB, accepted, counts)
        acceptance_mask_reference(ids.cpu(), drafts.cpu(), VOCAB, *expected)
        good &= same(accepted, expected[0]) and same(counts, expected[1])
    return good


def sampled_ids(requests: int, width: int) -> tuple[Tensor, Tensor]:
    """What rejection sampling returns, and the drafts of each request."""
    ids = torch.randint(0, VOCAB, (requests, width), device="cuda")
    valid = torch.randint(0, width + 1, (requests, 1), device="cuda")
    ids = ids.where(torch.arange(width, device="cuda") < valid, -1)
    return ids, torch.randint(0, width, (requests,), dtype=torch.int32, device="cuda")


def same(got: Tensor, expected: Tensor) -> bool:
    """Equal in every element, NaN (never written) included."""
    try:
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def print_row(what: str, ours: float, peers: dict[str, float]) -> None:
    told = "".join(f"  {name} {us:8.2f} us ({us / ours:5.2f}x)" for name, us in peers.items())
    print(f"{what:38s} {ours:8.2f} us{told}")


def time_commit(rows: int, rate: float, replays: int) -> None:
    """One launch against one stock write a layer of the same accepted tokens."""
    per_set = 2 * LAYERS * rows * HEADS * DIM * 2 * 2
    windows = [make_window(rows, rate) for _ in range(min(max(COLD_BYTES // per_set, 3), 32))]
    caches = make_caches()
    plan = CommitPlan(caches)

    def commit(window: Window, tokens: int | None = None) -> Call:
        w = window
        return lambda: plan.commit(
            w.key, w.value, w.slots, w.accepted, w.metadata, tokens_per_program=tokens
        )

    def commit_counts(window: Window) -> Call:
        w = window
        return lambda: plan.commit_counts(
            w.key,
            w.value,
            w.slots,
            w.num_accepted,
            w.draft_request,
            w.draft_index,
            w.metadata,
        )

    def per_layer(write: Callable[..., None], window: Window) -> Call:
        w = window

        def write_layers() -> None:
            for layer, cache in enumerate(caches):
                write(w.kept_key[layer], w.kept_value[layer], cache, w.kept_slots)

        return write_layers

    ours = us_per_call([commit(w) for w in windows], replays)
    peers = {"with counts": us_per_call([commit_counts(w) for w in windows], replays)}
    for tokens in (1, 2, 4, 8):
        calls = [commit(w, tokens) for w in windows]
        peers[f"tile {tokens}"] = us_per_call(calls, replays)
    peers["index_put"] = us_per_call([per_layer(torch_write, w) for w in windows], replays)
    stock = stock_write()
    if stock:
        peers["stock"] = us_per_call([per_layer(stock, w) for w in windows], replays)
    print_row(f"commit {rows} staged, acceptance {rate:.1f}", ours, peers)


def time_stage(rows: int, replays: int) -> None:
    """One layer's stage against one stock write of the same tokens."""
    sets = [make_window(rows, 1.0) for _ in range(2)]
    caches = make_caches()
    batch = torch.randn(LAYERS, 2, 2 * rows, HEADS, DIM, device="cuda").bfloat16()
    index = torch.arange(rows, device="cuda") * 2
    stock = stock_write()
    ours, peers = [], {"index_put": [], **({"stock": []} if stock else {})}
    for window in sets:
        for layer in range(LAYERS):
            k, v = batch[layer]
            to = (window.key[layer], window.value[layer], window.metadata[layer])
            ours.append(lambda k=k, v=v, to=to: stage_kv_cache_triton(k, v, index, *to))
            same_tokens = (window.kept_key[layer], window.kept_value[layer], caches[layer])
            for name, write in (("index_put", torch_write), ("stock", stock)):
                if write:
                    peers[name].append(lambda w=write, a=same_tokens, s=window.kept_slots: w(*a, s))
    told = {name: us_per_call(calls, replays) for name, calls in peers.items()}
    print_row(f"stage {rows} rows of one layer", us_per_call(ours, replays), told)


def time_mask(requests: int, replays: int) -> None:
    """The mask against a kernel that does nothing."""
    ids, drafts = sampled_ids(requests, DRAFTS + 1)
    accepted = torch.empty(requests * DRAFTS, dtype=torch.bool, device="cuda")
    counts = torch.empty(requests, dtype=torch.int32, device="cuda")
    ours = us_per_call(
        [lambda: acceptance_mask_triton(ids, drafts, VOCAB, accepted, counts)] * 50, replays
    )
    empty = us_per_call([lambda: _empty_kernel[(requests,)](counts, num_warps=1)] * 50, replays)
    print_row(f"mask {requests} requests", ours, {"empty": empty})


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=200)
    replays = parser.parse_args().replays
    torch.manual_seed(0)
    checks = {"commit": check_commit, "stage": check_stage, "mask": check_mask}
    results = {name: check() for name, check in checks.items()}
    for name, good in results.items():
        print(f"{name}: {'equal to the reference' if good else 'WRONG'}")
    if not all(results.values()):
        sys.exit(1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{LAYERS} layers, {HEADS} heads of {DIM}, bf16, blocks of {BLOCK_SIZE}; (peer / ours)")
    for rows in (32, 512):
        for rate in (1.0, 0.5):
            time_commit(rows, rate, replays)
    for rows in (32, 512):
        time_stage(rows, replays)
    for requests in (8, 64, 512):
        time_mask(requests, replays)


if __name__ == "__main__":
    main()
