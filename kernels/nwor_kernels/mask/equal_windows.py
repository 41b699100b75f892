"""Device code: the mask of windows of one length, from their counts: one load, then two stores.

Every entry of the mask loads its own request's count (they share a cache line or two), so that no
thread waits for another. The next kernel may start at once: it waits for this kernel's writes, and
its start-up overlaps with them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ENTRIES_PER_PROGRAM = 512
"""Most entries of the mask that a program writes, and a multiple of 128 threads."""


@triton.jit(
    do_not_specialize=["num_requests", "capacity"],
    do_not_specialize_on_alignment=["sampled", "accepted", "num_accepted"],
)
def equal_windows_kernel(
    sampled,
    accepted,
    num_accepted,
    num_requests,
    capacity,
    STRIDES: tl.constexpr,
    DRAFTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """One program: ENTRIES entries of the mask. STRIDES are those of the three tensors.

    Entries past the last request belong to requests that do not exist: they accept nothing.
    """
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    request = entry // DRAFTS
    draft = entry - request * DRAFTS
    exists = request < num_requests
    place = request.to(tl.int64)
    valid = tl.load(sampled + place * STRIDES[0], mask=exists, other=0)
    kept = tl.minimum(tl.maximum(valid - 1, 0), DRAFTS)
    inside = entry < capacity
    tl.store(accepted + entry.to(tl.int64) * STRIDES[1], draft < kept, mask=inside)
    tl.store(num_accepted + place * STRIDES[2], kept, mask=exists & (draft == 0))
