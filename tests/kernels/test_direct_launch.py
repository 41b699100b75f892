"""Launches: one look-up of each binary; what a direct launch gives the driver, and what it refuses.

The driver is a stand-in, built here against CUDA's header as Triton ships it, so that structures
which do not have the header's layout arrive as nonsense. test_direct_launch_gpu.py has a real one.
"""

import ctypes
import random
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
from driver_stand_in import (
    COUNTS,
    DEVICE,
    PLACES,
    SIGNATURE,
    SIZES,
    STREAM,
    Function,
    Record,
    StandInJit,
    StandInKernel,
    function_of,
)

from nwor_kernels import direct_launch, launch
from nwor_kernels.direct_launch import Refused, prepare, refusals
from nwor_kernels.launch import Launch, Launches


def random_arguments() -> list[Any]:
    """One for each parameter, and None where the kernel was compiled without."""
    address = [random.randrange(2**48) for _ in range(3)]
    size, small = random.randrange(-(2**62), 2**62), random.randrange(256)
    return [*address[:2], None, address[2], size, small, random.randrange(2**31)]


def arrived(record: Record) -> list[int]:
    """The parameters of the last launch, integers with their sign."""
    values = list(record.parameters)[: len(SIZES)]
    values[3] = struct.unpack("q", struct.pack("Q", values[3]))[0]
    return values


@pytest.mark.parametrize("early", [True, False])
def test_what_arrives_is_what_was_bound(record, early):
    given = random_arguments()
    kernel = StandInKernel(launch_pdl=early)
    run = prepare(kernel, (5, 6, 7), given, PLACES)
    assert record.launches == 0
    for launches in (1, 2, 3):
        address, number = random.randrange(2**63, 2**64), random.randrange(-(2**31), 2**31)
        run(address, number)
        assert record.launches == launches
        kept = [given[0], address, given[3], given[4], given[5], number % 2**32]
        assert arrived(record) == [*kept, 0, 0]
    assert (list(record.grid), list(record.block)) == ([5, 6, 7], [128, 1, 1])
    assert (record.shared_bytes, record.stream) == (48, STREAM)
    assert record.num_attributes == early
    if early:
        assert (record.attribute, record.attribute_value) == (6, 1)


def test_the_last_arguments_are_written_at_once_each_in_its_place(record):
    """A byte and, three bytes of padding later, a number."""
    given = random_arguments()
    run = prepare(StandInKernel(), (1, 1, 1), given, (4, 5, 6))
    for launches in (1, 2):
        size, small, number = -(2**40) - launches, 7 + launches, 2**31 - launches
        run(size, small, number)
        assert arrived(record) == [*given[:2], given[3], size, small, number, 0, 0]
        assert record.launches == launches
    with pytest.raises(struct.error):
        run(1, 2)
    assert record.launches == 2


def test_a_launch_goes_to_the_stream_that_is_current_then(record, streams):
    run = prepare(StandInKernel(), (1, 1, 1), random_arguments(), PLACES)
    for stream in (STREAM, 0, 0x55):
        streams[DEVICE] = stream
        run(1, 1)
        assert record.stream == stream


@pytest.mark.parametrize(
    ("answer", "name"), [(1, "CUDA_ERROR_INVALID_VALUE"), (77, "unknown to the driver")]
)
def test_a_failed_launch_says_what_the_driver_said(record, answer, name):
    run = prepare(StandInKernel(), (1, 1, 1), random_arguments(), PLACES)
    record.answer = answer
    with pytest.raises(RuntimeError, match=rf"cuLaunchKernelEx: {name} \({answer}\)"):
        run(1, 1)


@pytest.mark.parametrize("number", [2**31, 2**64])
def test_a_number_that_the_kernel_cannot_take_is_not_launched(record, number):
    run = prepare(StandInKernel(), (1, 1, 1), random_arguments(), PLACES)
    with pytest.raises(struct.error):
        run(1, number)
    assert record.launches == 0


def overlapping() -> Function:
    function = function_of(SIZES)
    function.offsets[1] = function.offsets[0] + 4
    return function


REFUSED = {
    "scratch_memory": {"global_scratch_size": 64},
    "scratch_memory ": {"profile_scratch_size": 64},
    "clusters": {"num_ctas": 2},
    "clusters ": {"cluster_dims": (2, 1, 1)},
    "cooperative_grid": {"launch_cooperative_grid": True},
    "shared_memory": {"shared": 228 * 1024},
    "tensor_descriptors": {"tensordesc_meta": [{"swizzle": 1}]},
    "backend": {"target": SimpleNamespace(backend="hip", arch="gfx942", warp_size=32)},
    "warp_size": {"target": SimpleNamespace(backend="cuda", arch=90, warp_size=64)},
    "tuples": {"signature": {**SIGNATURE, "flags": ("i32", "i32")}},
    "layout: an argument of type fp32": {"signature": {**SIGNATURE, "small": "fp32"}},
    "layout: an argument of type tensordesc": {
        "signature": {**SIGNATURE, "flags": "tensordesc<fp16[8]>"}
    },
    "layout: an argument that differs": {"signature": {**SIGNATURE, "number": "constexpr"}},
    "layout: an argument that differs ": {"signature": {**SIGNATURE, "counts": "constexpr"}},
    "layout: parameters at": {"function": function_of(SIZES[:-1])},
    "layout: parameters at ": {"function": function_of([*SIZES, 8])},
    "layout: parameters at  ": {"function": function_of([8, 8, 4, 8, 1, 4, 8, 8])},
    "layout: parameters overlap": {"function": overlapping()},
}
"""Reason (blanks at its end only tell them apart), and what the stand-in kernel has."""


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_understood_is_refused(record, reason):
    with pytest.raises(Refused, match=f"^{reason.strip()}"):
        prepare(StandInKernel(**REFUSED[reason]), (1, 1, 1), random_arguments(), PLACES)


def test_a_binary_that_is_not_loaded_or_of_another_triton_is_refused(record):
    kernel = StandInKernel()
    with pytest.raises(Refused, match="empty_grid"):
        prepare(kernel, (1, 0, 1), random_arguments(), PLACES)
    del kernel.metadata.launch_pdl, kernel.metadata.num_ctas
    with pytest.raises(Refused, match=r"missing: .*num_ctas"):
        prepare(kernel, (1, 1, 1), random_arguments(), PLACES)
    kernel = StandInKernel()
    kernel.function = None
    with pytest.raises(Refused, match="not_loaded"):
        prepare(kernel, (1, 1, 1), random_arguments(), PLACES)


def test_a_machine_without_the_driver_or_with_an_old_one_is_refused(record, monkeypatch):
    direct_launch.load_driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(Refused, match=r"missing: .*cuLaunchKernelEx"):
        prepare(StandInKernel(), (1, 1, 1), random_arguments(), PLACES)

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(Refused, match="missing: libcuda"):
        prepare(StandInKernel(), (1, 1, 1), random_arguments(), PLACES)


def bound(kernel: StandInKernel | None) -> tuple[StandInJit, Any, list[Any]]:
    """(The jit function, the bound launch, its fixed arguments)."""
    jit = StandInJit(kernel)
    fixed = [torch.zeros(2), None, torch.zeros(3), 2**40, 9]
    return jit, Launch(jit, (2, 1, 1), {"CONSTANT": 8}, num_warps=4).bind(*fixed, at=COUNTS), fixed


def test_a_bound_launch_goes_to_the_driver_from_the_second_time_on(record):
    kernel = StandInKernel()
    jit, run, fixed = bound(kernel)
    counts = [torch.zeros(n + 1, dtype=torch.int32) for n in range(3)]
    for number, tensor in enumerate(counts):
        run(tensor, number)
    assert len(jit.launches) == 1
    assert jit.launches[0][1:4] == (fixed[0], counts[0], None)
    assert record.launches == 2
    expected = [fixed[0].data_ptr(), counts[2].data_ptr(), fixed[2].data_ptr(), 2**40, 9, 2, 0, 0]
    assert arrived(record) == expected
    assert not kernel.by_triton
    assert not refusals


def test_a_launch_whose_first_arguments_are_bound(record):
    kernel = StandInKernel()
    jit = StandInJit(kernel)
    table, flags = torch.zeros(2), torch.zeros(3)
    signature = {"table": "*i64", "counts": "*i32", "flags": "*i1", "number": "i32"}
    kernel.src.signature = {**signature, "CONSTANT": "constexpr"}
    kernel.layout = function_of([8, 8, 8, 4, 8, 8])
    kernel.function = ctypes.addressof(kernel.layout)
    run = Launch(jit, (2, 1, 1), {"CONSTANT": 8}, num_warps=4).bind_last(table)
    for number in (1, 2):
        counts = torch.zeros(4, dtype=torch.int32)
        run(counts, flags, number)
    assert jit.launches[0][1:5] == (table, jit.launches[0][2], flags, 1)
    assert (len(jit.launches), record.launches) == (1, 1)
    parameters = list(record.parameters)[:6]
    assert parameters == [table.data_ptr(), counts.data_ptr(), flags.data_ptr(), 2, 0, 0]


def test_a_refused_launch_stays_with_triton_and_is_counted_and_said_once(record, caplog):
    for _ in range(2):
        kernel = StandInKernel(num_ctas=2)
        _, run, fixed = bound(kernel)
        counts = torch.zeros(4, dtype=torch.int32)
        for number in range(3):
            run(counts, number)
        given = (fixed[0], counts, None, fixed[2], 2**40, 9)
        expected = [((2, 1, 1), *given, number, 8) for number in (1, 2)]
        assert kernel.by_triton == expected
    assert record.launches == 0
    assert refusals == {"clusters": 2}
    assert [line.getMessage().endswith("clusters") for line in caplog.records] == [True]


def test_a_fault_while_a_direct_launch_is_prepared_does_not_fail_the_launch_that_was_made(
    record, monkeypatch
):
    """Whoever asked for it would make it again, and not every kernel may run twice."""
    jit, run, _ = bound(StandInKernel())
    monkeypatch.setattr(launch, "prepare", lambda *_: struct.pack("B", 256))
    for number in range(3):
        run(torch.zeros(4, dtype=torch.int32), number)
    assert len(jit.launches) == 1
    assert refusals == {"error": 1}


@pytest.mark.parametrize("end", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_hears_of_launches_while_it_listens(record, end):
    kernel = StandInKernel()
    _, run, _ = bound(kernel)
    hook = getattr(triton.knobs.runtime, end)
    counts, seen = torch.zeros(4, dtype=torch.int32), []
    for number in range(2):
        run(counts, number)
    assert (record.launches, len(kernel.by_triton)) == (1, 0)
    hook.add(seen.append)
    try:
        run(counts, 2)
        with pytest.raises(Refused, match="launch_hooks"):
            prepare(kernel, (1, 1, 1), random_arguments(), PLACES)
    finally:
        hook.remove(seen.append)
    assert (record.launches, len(kernel.by_triton)) == (1, 1)
    run(counts, 3)
    assert record.launches == 2


def test_an_interpreted_kernel_is_launched_as_it_always_was(record):
    jit, run, _ = bound(None)
    for number in range(3):
        run(torch.zeros(4, dtype=torch.int32), number)
    assert len(jit.launches) == 3
    assert record.launches == 0


GIVEN = (torch.ones(8), torch.ones(8), None, None, 2**40, 9, 5)
LOOKED_UP: dict[str, Any] = {"grid": (4, 1, 1), "arguments": GIVEN, "constants": {"CONSTANT": 8}}


def launch_twice(**changes: Any) -> tuple[StandInJit, StandInKernel]:
    """A launch of LOOKED_UP and one with changes, through `Launches` with `number` free."""
    kernel = StandInKernel()
    jit = StandInJit(kernel)
    launches = Launches(jit, free=frozenset({"number"}))
    launches(**LOOKED_UP, num_warps=4)
    launches(**{**LOOKED_UP, "num_warps": 4, **changes})
    return jit, kernel


def test_a_binary_is_looked_up_once():
    again = (torch.randn(3, 8), *GIVEN[1:6], 7)
    jit, kernel = launch_twice(arguments=again)
    assert len(jit.launches) == 1
    assert kernel.by_triton == [((4, 1, 1), *again, 8)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"grid": (5, 1, 1)}, id="grid"),
        pytest.param({"arguments": (torch.ones(8).half(), *GIVEN[1:])}, id="dtype"),
        pytest.param({"arguments": (torch.ones(9)[1:], *GIVEN[1:])}, id="alignment"),
        pytest.param({"arguments": (*GIVEN[:2], torch.ones(8), *GIVEN[3:])}, id="none"),
        pytest.param({"arguments": (*GIVEN[:5], 1, 5)}, id="number"),
        pytest.param({"constants": {"CONSTANT": 16}}, id="constant"),
        pytest.param({"num_warps": 8}, id="warps"),
    ],
)
def test_another_binary_is_looked_up_again(changes):
    jit, kernel = launch_twice(**changes)
    assert len(jit.launches) == 2
    assert not kernel.by_triton
