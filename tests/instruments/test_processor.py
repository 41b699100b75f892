"""bf16 only where the processor multiplies it natively; elsewhere float32."""

import pytest

from nwor_bench.instruments import device
from nwor_bench.instruments.device import float32_reason, no_native_bf16

AVX2 = "processor\t: 0\nmodel name\t: avx512_bf16 in a name\nflags\t\t: fpu sse2 avx avx2 fma\n"
AVX512 = "flags\t\t: avx2 avx512f avx512_vnni\n"
AVX512_BF16 = "flags\t\t: avx2 avx512f avx512_bf16\n"
AMX = "flags\t\t: avx2 avx512f amx_bf16 amx_tile\n"
ARM = "Features\t: fp asimd bf16 i8mm\n"


@pytest.mark.parametrize("text", [AVX512_BF16, AMX, ARM])
def test_native_bf16(text: str) -> None:
    assert no_native_bf16(text, {}) is None


@pytest.mark.parametrize("text", [AVX2, AVX512, ""])
def test_no_native_bf16(text: str) -> None:
    assert "no native bf16" in (no_native_bf16(text, {}) or "")


@pytest.mark.parametrize("isa", ["AVX2", "avx2", "AVX512_CORE", "AVX512_CORE_VNNI"])
def test_a_lower_instruction_set_of_onednn_counts(isa: str) -> None:
    reason = no_native_bf16(AMX, {"ONEDNN_MAX_CPU_ISA": isa})
    assert reason == f"ONEDNN_MAX_CPU_ISA={isa} has no native bf16"


@pytest.mark.parametrize("isa", ["", "ALL", "AVX512_CORE_BF16", "AVX512_CORE_AMX"])
def test_an_instruction_set_with_bf16_changes_nothing(isa: str) -> None:
    assert no_native_bf16(AMX, {"ONEDNN_MAX_CPU_ISA": isa}) is None


@pytest.mark.parametrize(
    ("dtype", "gpu", "isa", "changes"),
    [
        ("bfloat16", False, "AVX2", True),
        ("auto", False, "AVX2", True),
        ("float32", False, "AVX2", False),
        ("bfloat16", True, "AVX2", False),
        ("bfloat16", False, "ALL", False),
    ],
)
def test_dtype_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    gpu: bool,
    isa: str,
    changes: bool,
) -> None:
    info = tmp_path_factory.mktemp("proc") / "cpuinfo"
    info.write_text(AMX)
    monkeypatch.setattr(device, "CPU_INFO", info)
    monkeypatch.setattr(device, "uses_gpu", lambda: gpu)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert (float32_reason(dtype) is not None) == changes
