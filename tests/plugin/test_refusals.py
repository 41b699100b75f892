"""Which configurations are refused, by which name, with the real configurations of vLLM."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nwor_bench.instruments import draft_counts
from nwor_bench.instruments.contract import Source
from nwor_bench.plugin import refusals
from nwor_bench.plugin.layers import TargetLayers, attention_layers
from nwor_bench.plugin.runner_v1 import cpu_attention
from nwor_bench.plugin.runner_v2 import setup as gpu_setup
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records.types import NworMode, ScvMode

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported

SETTINGS = PluginSettings(NworMode.STAGE, ScvMode.OFF, debug=False)
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]


def attention_layer(kind: str = "Flash", **changes: Any) -> Any:
    """A layer with vLLM's own implementation, made without a GPU; `changes` are the impl's."""
    module = import_module(f"vllm.v1.attention.backends.{kind.lower()}_attn")
    impl = object.__new__(getattr(module, f"{kind}AttentionImpl"))
    settings = {
        "attn_type": "decoder",
        "alibi_slopes": None,
        "sinks": None,
        "kv_cache_dtype": "auto",
        "head_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "scale": 0.1,
        "logits_soft_cap": 0.0,
        "sliding_window": (-1, -1),
        "chunk_lookback": -1,
    }
    vars(impl).update(settings | changes)
    return SimpleNamespace(
        impl=impl,
        attn_backend=getattr(module, f"{kind}AttentionBackend"),
        head_size=64,
        head_size_v=64,
        kv_cache=torch.zeros(3, 2, 16, 128),
    )


def vllm_config(kv_transfer: Any = None, **model: Any) -> Any:
    """What of vLLM's configuration is looked at; `model` are its model's settings."""
    settings = SimpleNamespace(**{"rswa_window": None, **model})
    return SimpleNamespace(
        kv_transfer_config=kv_transfer, model_config=settings, speculative_config=object()
    )


def runner_with(layers: dict[str, Any], compilation: Any = None, **changes: Any) -> Any:
    """A V2 runner that could stage these layers, but for what `changes` say."""
    from vllm.config import CompilationConfig, CompilationMode

    compilation = compilation or CompilationConfig(mode=CompilationMode.NONE)
    compilation.static_forward_context = dict(layers)
    group = SimpleNamespace(layer_names=list(layers))
    size = next((layer.kv_cache.shape[2] for layer in layers.values() if hasattr(layer, "impl")), 0)
    facts = {
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[group]),
        "compilation_config": compilation,
        "vllm_config": vllm_config(),
        "parallel_config": SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        "use_pp": False,
        "dcp_size": 1,
        "pcp_manager": None,
        "adaptive_verification": None,
        "ubatch_runner": None,
        "lora_config": None,
        "cudagraph_manager": None,
        "num_speculative_steps": 4,
        "max_num_reqs": 2,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "attn_groups": [[attention_group(list(layers), size)]],
        "input_buffers": SimpleNamespace(query_start_loc=None, seq_lens=None),
        "block_tables": SimpleNamespace(input_block_tables=[None]),
        "max_model_len": 1024,
    }
    return SimpleNamespace(**(facts | changes))


def attention_group(names: list[str], block_size: int = 16, builder: Any = None) -> Any:
    """A group in which the runner builds these layers' metadata."""
    return SimpleNamespace(
        layer_names=names,
        kv_cache_spec=SimpleNamespace(block_size=block_size),
        kernel_block_size=None,
        metadata_builders=[] if builder is None else [builder],
    )


def reason_of(runner: Any) -> str | None:
    """Why staging is unavailable; None if all of it could be set up."""
    parts, reason = gpu_setup.set_up_staging(runner, attention_layers(runner), SETTINGS)
    assert (parts is None) == (reason is not None)
    return reason


def two(layer: Any = None) -> dict[str, Any]:
    """Two target layers, the second one as given."""
    return {NAMES[0]: attention_layer(), NAMES[1]: layer or attention_layer()}


def marked(layer: Any, **marks: Any) -> Any:
    """The layer, or what else is given, with these attributes."""
    vars(layer).update(marks)
    return layer


# What an engine was started with.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_config": object()}, None),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, "data_parallel"),
        ({"vllm_config": vllm_config(enable_sleep_mode=True)}, "sleep_mode"),
        ({"vllm_config": vllm_config(rswa_window=512)}, "rswa_window"),
        ({"use_pp": True}, "pipeline_parallel"),
        ({"dcp_size": 2}, "context_parallel"),
        ({"pcp_manager": object()}, "context_parallel"),
        ({"adaptive_verification": object()}, "adaptive_verification"),
        ({"ubatch_runner": object()}, "micro_batches"),
        ({"batch_sharder": object()}, "batch_sharded_sampling"),
        ({"batch_sharder": None}, None),
        ({"parallel_config": SimpleNamespace(data_parallel_size=1, enable_eplb=True)}, "eplb"),
    ],
)
def test_what_the_engine_was_started_with(changes: dict[str, Any], reason: str | None) -> None:
    assert reason_of(runner_with(two(), **changes)) == reason


def on_a_cpu(marks: dict[str, Any], **changes: Any) -> str | None:
    """Why vLLM's V1 runner cannot stage its one layer; `marks` are attributes of the layer."""
    impl = object.__new__(cpu_attention.ReferenceCPUAttentionImpl)
    impl.why_stock = None
    backend = cpu_attention.ReferenceCPUAttentionBackend
    layer = marked(attention_layer(), impl=impl, attn_backend=backend, **marks)
    runner = runner_with({NAMES[0]: layer}, **changes)
    return cpu_attention.set_up_staging(runner, TargetLayers([NAMES[0]]), 8)[1]


def on_a_gpu(marks: dict[str, Any], **changes: Any) -> str | None:
    """Why vLLM's V2 runner cannot stage its two layers; `marks` are attributes of the second."""
    return reason_of(runner_with(two(marked(attention_layer(), **marks)), **changes))


@pytest.mark.parametrize("refused_by", [on_a_cpu, on_a_gpu])
@pytest.mark.parametrize(
    ("batch_invariant", "marks", "changes", "reason"),
    [
        ("0", {}, {}, None),
        ("1", {}, {}, "batch_invariant"),
        # Such a connector reads the cache within a step.
        ("0", {}, {"vllm_config": vllm_config(object())}, "kv_transfer"),
        # vLLM 0.33's backends say that they could bypass the write; a layer's mark says that it
        # does. Attention is then called with `key=None`, which each step would refuse too.
        ("0", {"kv_cache_update_bypass": True}, {}, "kv_cache_update_bypass"),
        ("0", {"kv_cache_update_bypass": False}, {}, None),
    ],
)
def test_what_both_runners_refuse(
    monkeypatch: pytest.MonkeyPatch,
    refused_by: Any,
    batch_invariant: str,
    marks: dict[str, Any],
    changes: dict[str, Any],
    reason: str | None,
) -> None:
    from vllm.v1.attention.backend import AttentionBackend

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", batch_invariant)
    monkeypatch.setattr(AttentionBackend, "supports_kv_cache_update_bypass", True, raising=False)
    assert refused_by(marks, **changes) == reason


def test_an_engine_without_drafts_stages_nothing() -> None:
    plain = vllm_config()
    assert refusals.of_engine(plain) is None
    plain.speculative_config = None
    assert refusals.of_engine(plain) == "no_speculation"


def test_vllm_names_what_is_refused_as_we_do() -> None:
    """A setting that vLLM renames would no longer be refused."""
    from vllm import envs
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

    assert "VLLM_BATCH_INVARIANT" in dir(envs)
    assert "kv_transfer_config" in VllmConfig.__dataclass_fields__
    assert "enable_sleep_mode" in ModelConfig.__dataclass_fields__
    assert "enable_eplb" in ParallelConfig.__dataclass_fields__
    runner = Path(str(find_spec("vllm.v1.worker.gpu.model_runner").origin))
    assert "self.batch_sharder = BatchSharder(" in runner.read_text()


def test_data_parallel_ranks_of_a_dense_model_are_engines_of_their_own() -> None:
    """What vLLM makes of the configuration in the process of such a rank."""
    from vllm.config import ParallelConfig

    parallel = ParallelConfig(data_parallel_size=2)
    assert reason_of(runner_with(two(), parallel_config=parallel)) == "data_parallel"
    parallel.reconfigure_for_independent_dp_rank()
    assert reason_of(runner_with(two(), parallel_config=parallel)) is None


def test_vllms_older_runner_is_refused_on_a_gpu() -> None:
    """Before anything else is looked at: its attention there is stock vLLM's."""
    for device, reason in (("cuda", "v1_runner_on_gpu"),
                           ("cpu", "unsupported_attention:FlashAttentionImpl")):  # fmt: skip
        runner = runner_with(two(), device=torch.device(device))
        found = cpu_attention.set_up_staging(runner, attention_layers(runner), 8)
        assert found == (None, reason)


V2 = "vllm.v1.worker.gpu.spec_decode"


@pytest.mark.parametrize(
    ("module", "name", "refused"),
    [
        ("eagle", "EagleSpeculator", False),
        ("mtp", "MTPSpeculator", False),
        ("standalone_ar", "StandaloneARSpeculator", True),  # method draft_model
        ("multi_module_mtp", "MultiModuleMTPSpeculator", True),
    ],
)
def test_only_drafters_of_one_batch_follow_the_scheduler(
    module: str, name: str, refused: bool
) -> None:
    kind: Any = getattr(pytest.importorskip(f"{V2}.{module}.speculator"), name)
    runner = SimpleNamespace(speculator=object.__new__(kind))
    assert refusals.constant_drafter(runner) == (name if refused else None)
    assert refusals.constant_drafter(SimpleNamespace(drafter=object())) is None  # V1's


@pytest.mark.parametrize("method", ["_store_hidden_states", "propose"])
def test_dflash_follows_if_it_drafts_nothing_at_no_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """vLLM 0.33 has such a drafter."""
    module = tmp_path / "v1/worker/gpu/spec_decode/dflash/speculator.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"class DFlashSpeculator:\n    def {method}(self): pass\n")
    monkeypatch.setattr(draft_counts, "installed_source", lambda: Source(tmp_path))
    follows = method == "_store_hidden_states"
    runner = SimpleNamespace(speculator=type("DFlashSpeculator", (), {})())
    assert refusals.constant_drafter(runner) == (None if follows else "DFlashSpeculator")
    assert draft_counts.changes_count("dflash") is follows
    assert not draft_counts.changes_count("dspark")


def test_a_fault_of_our_own_is_a_reason_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_setup, "GpuStaging", Mock(side_effect=MemoryError("planted")))
    with caplog.at_level("ERROR", "vllm.nwor_bench"):
        assert reason_of(runner_with(two())) == "setup:MemoryError"
    assert "planted" in caplog.text


# Compilation and graphs.


def compiled(mode: int = 3, fusion: str | None = None, **settings: Any) -> Any:
    """vLLM's compilation configuration as an engine has it after its start."""
    from vllm.config import CompilationConfig

    config = CompilationConfig(mode=mode, **settings)
    if mode:
        config.set_splitting_ops_for_v1("allgather_reducescatter")
    if fusion is not None:
        setattr(config.pass_config, fusion, True)
    return config


WHOLE = "whole_graph_compilation"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"mode": 1}, WHOLE),
        ({"mode": 2}, WHOLE),
        ({"splitting_ops": []}, WHOLE),
        # The write is captured with the rest.
        ({"splitting_ops": ["vllm::unified_attention_with_output"]}, WHOLE),
        ({"splitting_ops": ["vllm::unified_kv_cache_update"]}, WHOLE),
        ({"splitting_ops": ["vllm::mamba_mixer2"]}, WHOLE),
        ({"use_inductor_graph_partition": True}, "inductor_graph_partition"),
        *(
            ({"fusion": fusion}, fusion)
            for fusion in ("fuse_attn_quant", "fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache")
        ),
        # Without compilation none of that matters.
        ({"mode": 0, "use_inductor_graph_partition": True, "fusion": "fuse_attn_quant"}, None),
    ],
)
def test_code_that_hides_the_write_or_the_attention_is_refused(
    settings: dict[str, Any], reason: str | None
) -> None:
    assert reason_of(runner_with(two(), compiled(**settings))) == reason


@pytest.mark.parametrize(
    ("manager", "breakable"),
    [
        (SimpleNamespace(use_breakable_cg=True), True),
        (SimpleNamespace(use_breakable_cg=False), False),
        (SimpleNamespace(), True),  # a manager that does not say it: the variable does
        (None, False),  # without any CUDA graphs the variable changes nothing
    ],
)
def test_breakable_piecewise_graphs_are_a_matter_of_each_step(
    monkeypatch: pytest.MonkeyPatch, manager: Any, breakable: bool
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert refusals.breaks_piecewise_graphs(manager) is breakable
    assert reason_of(runner_with(two(), cudagraph_manager=manager)) is None


# Layers.


def derived_backend(which: str) -> Any:
    """vLLM's own derived backends of FlashAttention."""
    from vllm.model_executor.layers.attention import chunked_local_attention, static_sink_attention
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    if which == "chunked":
        create = chunked_local_attention.create_chunked_local_attention_backend
        return create(FlashAttentionBackend, 8192)
    if which == "sinks":
        create = static_sink_attention.create_static_sink_attention_backend
        return create(FlashAttentionBackend, sink_len=16)
    return create_fast_prefill_custom_backend("FastPrefill", FlashAttentionBackend)


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("chunked", "chunked_local_attention"),
        ("sinks", "attention_metadata:StaticSinkAttentionBuilder"),
        ("fast prefill", "attention_metadata:FastPrefillAttentionBuilder"),
    ],
)
def test_a_layer_whose_metadata_are_not_per_request_is_refused(which: str, reason: str) -> None:
    """The layer's implementation is FlashAttention's, and all layers are in one KV-cache group.

    Fast prefill is chosen by the runner: the layer's own backend does not tell.
    """
    backend = derived_backend(which)
    assert reason_of(runner_with(two(marked(attention_layer(), attn_backend=backend)))) == reason
    builder = object.__new__(backend.get_builder_cls())
    group = attention_group(NAMES[1:], builder=builder)
    stock = attention_group(NAMES[:1])
    assert reason_of(runner_with(two(), attn_groups=[[stock, group]])) == reason
    other = attention_group(["model.layers.9.drafter"], builder=builder)
    assert reason_of(runner_with(two(), attn_groups=[[attention_group(NAMES), other]])) is None


def test_a_chunked_layer_is_staged_if_it_tells_its_chunk() -> None:
    backend = derived_backend("chunked")
    layer = marked(attention_layer(), attn_backend=backend, attention_chunk_size=8192)
    assert refusals.chunk_of(layer) == 8192
    assert refusals.chunk_of(attention_layer()) == -1
    assert reason_of(runner_with(two(layer))) is None


def stock_layer(module: str, name: str) -> Any:
    """A layer of vLLM's own class, without its weights."""
    layer = object.__new__(getattr(import_module(f"vllm.model_executor.{module}"), name))
    torch.nn.Module.__init__(layer)
    return layer


def of_module(module: str) -> Any:
    return type("Layer", (), {"__module__": module})()


def indexer() -> Any:
    return stock_layer("models.deepseek_v2", "DeepseekV32IndexerCache")


QSA, MLA = "vllm.models.qwen4_exp.nvidia.qsa", "vllm.models.kimi_k3.nvidia.mla"


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (lambda: [attention_layer("Triton"), attention_layer("Triton")], None),
        (
            lambda: [attention_layer("Triton", sliding_window=(31, 0), chunk_lookback=1)],
            "chunk_lookback",
        ),
        # vLLM 0.33 names it; 0.32 has no such attribute.
        (lambda: [attention_layer(kv_cache_update_bypass=True)], "kv_cache_update_bypass"),
        (lambda: [indexer()], "sparse_indexer"),
        (lambda: [of_module("memory")], "layer_without_attention:Layer"),
        (lambda: [marked(attention_layer(), impl=of_module(QSA))], "own_attention:qwen4_exp"),
        # A model's own module is refused before its layers are told apart.
        (lambda: [indexer(), of_module(MLA)], "own_attention:kimi_k3"),
    ],
)
def test_layers_are_refused_by_what_they_are(layers: Any, reason: str | None) -> None:
    made = layers()
    each = dict(zip(NAMES, made, strict=True)) if len(made) > 1 else two(*made)
    assert reason_of(runner_with(each)) == reason


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("layers.mamba.mamba_mixer", "MambaMixer"),
        ("layers.mamba.mamba_mixer2", "MambaMixer2"),
        ("layers.mamba.short_conv", "ShortConv"),
        ("layers.mamba.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"),
    ],
)
def test_a_hybrids_recurrent_layers_are_left_as_stock(module: str, name: str) -> None:
    for number in (0, 1):
        layers = two(stock_layer(module, name))
        staged, recurrent = NAMES
        runner = runner_with(dict(list(layers.items())[:: 1 - 2 * number]))
        found = attention_layers(runner)
        assert (found.staged, found.recurrent) == ([staged], [recurrent])
        runner.attn_groups = [[attention_group([staged])]]
        assert reason_of(runner) is None
    alone = runner_with({NAMES[1]: stock_layer(module, name)})
    assert reason_of(alone) == "recurrent_layers"


@pytest.mark.parametrize(
    ("positional", "named", "reason"),
    [
        ((), {}, None),
        ((None, None), {}, None),
        ((), {"output_scale": None, "output_block_scale": None}, None),
        ((1.0,), {}, "attention:output_scale"),
        ((None, 1.0), {}, "attention:output_block_scale"),
        ((None, None, 1.0), {}, "attention:argument_2"),
        ((None,), {"of_a_later_vllm": 1.0}, "attention:of_a_later_vllm"),
    ],
)
def test_no_argument_of_attention_is_dropped(
    positional: tuple[Any, ...], named: dict[str, Any], reason: str | None
) -> None:
    assert refusals.of_call("K", "V", positional, named) == reason
    bypassed = "attention:kv_cache_update_bypass"
    assert refusals.of_call(None, "V", positional, named) == bypassed
    assert refusals.of_call("K", None, positional, named) == bypassed
