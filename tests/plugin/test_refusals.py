"""Which configurations are refused, by which name, with the real configurations of vLLM."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records.types import NworMode, ScvMode

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported

SETTINGS = PluginSettings(NworMode.STAGE, ScvMode.OFF, debug=False)
NAMES = ["model.layers.0.attn", "model.layers.1.attn"]


def attention_layer(kind: str = "Flash", **changes: Any) -> Any:
    """A layer with vLLM's own implementation, made without a GPU; `changes` are the impl's."""
    from vllm.v1.attention.backends import flash_attn, triton_attn

    module = {"Flash": flash_attn, "Triton": triton_attn}[kind]
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


def runner_with(
    layers: dict[str, Any], compilation: Any = None, manager: Any = None, **changes: Any
) -> Any:
    """A V2 runner that could stage these layers, but for what `changes` say."""
    from vllm.config import CompilationConfig, CompilationMode

    compilation = compilation or CompilationConfig(mode=CompilationMode.NONE)
    compilation.static_forward_context = dict(layers)
    group = SimpleNamespace(layer_names=list(layers))
    size = next((layer.kv_cache.shape[2] for layer in layers.values() if hasattr(layer, "impl")), 0)
    attention = attention_group(list(layers), size)
    facts = {
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[group]),
        "compilation_config": compilation,
        "vllm_config": vllm_config(),
        "parallel_config": SimpleNamespace(data_parallel_size=1),
        "use_pp": False,
        "dcp_size": 1,
        "pcp_manager": None,
        "adaptive_verification": None,
        "ubatch_runner": None,
        "lora_config": None,
        "cudagraph_manager": manager,
        "num_speculative_steps": 4,
        "max_num_reqs": 2,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "attn_groups": [[attention]],
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
    from nwor_bench.plugin.layers import attention_layers
    from nwor_bench.plugin.runner_v2.setup import set_up_staging

    parts, reason = set_up_staging(runner, attention_layers(runner), SETTINGS)
    assert (parts is None) == (reason is not None)
    return reason


def two(layer: Any = None) -> dict[str, Any]:
    """Two target layers, the second one as given."""
    return {NAMES[0]: attention_layer(), NAMES[1]: layer or attention_layer()}


def compiled(mode: int = 3, *, split: bool = True, **settings: Any) -> Any:
    """vLLM's compilation configuration as an engine has it after its start."""
    from vllm.config import CompilationConfig

    config = CompilationConfig(mode=mode, **settings)
    if split:
        config.set_splitting_ops_for_v1("allgather_reducescatter")
    return config


@pytest.mark.parametrize("kind", ["Flash", "Triton"])
def test_what_can_be_staged_is_not_refused(kind: str) -> None:
    layers = {name: attention_layer(kind) for name in NAMES}
    assert reason_of(runner_with(layers)) is None
    assert reason_of(runner_with(layers, compiled())) is None


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


def on_a_cpu(marks: dict[str, Any] | None = None, **changes: Any) -> str | None:
    """Why vLLM's V1 runner cannot stage its one layer; `marks` are attributes of the layer."""
    from nwor_bench.plugin.layers import TargetLayers
    from nwor_bench.plugin.runner_v1.cpu_attention import (
        ReferenceCPUAttentionBackend,
        ReferenceCPUAttentionImpl,
        set_up_staging,
    )

    impl = object.__new__(ReferenceCPUAttentionImpl)
    impl.why_stock = None
    layer = attention_layer()
    layer.impl, layer.attn_backend = impl, ReferenceCPUAttentionBackend
    vars(layer).update(marks or {})
    parallel = SimpleNamespace(pipeline_parallel_size=1)
    runner = runner_with({NAMES[0]: layer}, parallel_config=parallel, **changes)
    return set_up_staging(runner, TargetLayers([NAMES[0]]), 8)[1]


def on_a_gpu(marks: dict[str, Any] | None = None, **changes: Any) -> str | None:
    """Why vLLM's V2 runner cannot stage its two layers; `marks` are attributes of the second."""
    layer = attention_layer()
    vars(layer).update(marks or {})
    return reason_of(runner_with(two(layer), **changes))


BOTH_RUNNERS = pytest.mark.parametrize("refused_by", [on_a_cpu, on_a_gpu])


@BOTH_RUNNERS
def test_a_connector_that_reads_the_cache_within_a_step_is_refused(refused_by: Any) -> None:
    assert refused_by() is None
    assert refused_by(vllm_config=vllm_config(object())) == "kv_transfer"


def test_an_engine_without_drafts_stages_nothing() -> None:
    from nwor_bench.plugin.refusals import of_engine

    plain = vllm_config()
    assert of_engine(plain) is None
    plain.speculative_config = None
    assert of_engine(plain) == "no_speculation"


@BOTH_RUNNERS
def test_a_batch_invariant_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, refused_by: Any
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert refused_by() == "batch_invariant"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert refused_by() is None


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


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mode": 1}, "whole_graph_compilation"),
        ({"mode": 2}, "whole_graph_compilation"),
        *(
            ({"splitting_ops": ops}, "whole_graph_compilation")
            for ops in (
                [],
                ["vllm::unified_attention_with_output"],  # the write is captured with the rest
                ["vllm::unified_kv_cache_update"],
                ["vllm::mamba_mixer2"],
            )
        ),
        ({"use_inductor_graph_partition": True}, "inductor_graph_partition"),
    ],
)
def test_code_that_hides_the_write_or_the_attention_is_refused(
    settings: dict[str, Any], reason: str
) -> None:
    assert reason_of(runner_with(two(), compiled(**settings))) == reason


@pytest.mark.parametrize(
    "fusion", ["fuse_attn_quant", "fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache"]
)
def test_a_fused_write_or_attention_is_refused_by_its_name(fusion: str) -> None:
    config = compiled()
    setattr(config.pass_config, fusion, True)
    assert reason_of(runner_with(two(), config)) == fusion


def test_without_compilation_none_of_that_matters() -> None:
    config = compiled(mode=0)
    config.use_inductor_graph_partition = True
    config.pass_config.fuse_attn_quant = True
    assert config.splitting_ops == []
    assert reason_of(runner_with(two(), config)) is None


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
    from nwor_bench.plugin.refusals import breaks_piecewise_graphs

    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert breaks_piecewise_graphs(manager) is breakable
    assert reason_of(runner_with(two(), manager=manager)) is None


def derived_backend(which: str) -> Any:
    """vLLM's own derived backends of FlashAttention."""
    from vllm.model_executor.layers.attention import chunked_local_attention, static_sink_attention
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    if which == "chunked":
        return chunked_local_attention.create_chunked_local_attention_backend(
            FlashAttentionBackend, 8192
        )
    if which == "sinks":
        return static_sink_attention.create_static_sink_attention_backend(
            FlashAttentionBackend, sink_len=16
        )
    return create_fast_prefill_custom_backend("FastPrefill", FlashAttentionBackend)


DERIVED = [
    ("chunked", "chunked_local_attention"),
    ("sinks", "attention_metadata:StaticSinkAttentionBuilder"),
    ("fast prefill", "attention_metadata:FastPrefillAttentionBuilder"),
]


@pytest.mark.parametrize(("which", "reason"), DERIVED)
def test_a_layer_whose_metadata_are_not_per_request_is_refused(which: str, reason: str) -> None:
    """The layer's implementation is FlashAttention's, and all layers are in one KV-cache group."""
    layer = attention_layer()
    layer.attn_backend = derived_backend(which)
    assert reason_of(runner_with(two(layer))) == reason


@pytest.mark.parametrize(("which", "reason"), DERIVED)
def test_so_is_a_group_for_which_the_runner_derived_the_builder(which: str, reason: str) -> None:
    """Fast prefill is chosen by the runner: the layer's own backend does not tell."""
    builder = object.__new__(derived_backend(which).get_builder_cls())
    stock = attention_group(NAMES[:1])
    group = attention_group(NAMES[1:], builder=builder)
    assert reason_of(runner_with(two(), attn_groups=[[stock, group]])) == reason
    other = attention_group(["model.layers.9.drafter"], builder=builder)
    assert reason_of(runner_with(two(), attn_groups=[[attention_group(NAMES), other]])) is None


def test_a_chunked_layer_is_staged_if_it_tells_its_chunk() -> None:
    from nwor_bench.plugin import refusals

    layer = attention_layer()
    layer.attn_backend = derived_backend("chunked")
    layer.attention_chunk_size = 8192
    assert refusals.chunk_of(layer) == 8192
    assert refusals.chunk_of(attention_layer()) == -1
    assert reason_of(runner_with(two(layer))) is None


def test_vllms_older_runner_is_refused_on_a_gpu() -> None:
    """Before anything else is looked at: its attention there is stock vLLM's."""
    from nwor_bench.plugin.layers import attention_layers
    from nwor_bench.plugin.runner_v1.cpu_attention import set_up_staging

    runner = runner_with(two(), device=torch.device("cuda"))
    runner.parallel_config.pipeline_parallel_size = 1
    found = set_up_staging(runner, attention_layers(runner), 8)
    assert found == (None, "v1_runner_on_gpu")
    runner.device = torch.device("cpu")
    found = set_up_staging(runner, attention_layers(runner), 8)
    assert found == (None, "unsupported_attention:FlashAttentionImpl")


def test_attention_over_chunks_of_a_window_is_refused() -> None:
    layer = attention_layer("Triton", sliding_window=(31, 0), chunk_lookback=1)
    assert reason_of(runner_with(two(layer))) == "chunk_lookback"


def test_a_write_that_an_implementation_bypasses_is_refused() -> None:
    """vLLM 0.33 names it; 0.32 has no such attribute."""
    layer = attention_layer()
    layer.impl.kv_cache_update_bypass = True
    assert reason_of(runner_with(two(layer))) == "kv_cache_update_bypass"


@BOTH_RUNNERS
@pytest.mark.parametrize(("writes", "reason"), [(False, None), (True, "kv_cache_update_bypass")])
def test_a_kernel_that_writes_rotated_keys_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, refused_by: Any, writes: bool, reason: str | None
) -> None:
    """vLLM 0.33's backends say that they could bypass the write; a layer's mark says that it does.

    Attention is then called with `key=None`, which each step would refuse too: see the tests of
    `attention:kv_cache_update_bypass`.
    """
    from vllm.v1.attention.backend import AttentionBackend

    monkeypatch.setattr(AttentionBackend, "supports_kv_cache_update_bypass", True, raising=False)
    assert refused_by({"kv_cache_update_bypass": writes}) == reason


def recurrent(module: str, name: str) -> Any:
    """A layer of vLLM's own class, without its weights."""
    from importlib import import_module

    import torch.nn as nn

    layer = object.__new__(getattr(import_module(f"vllm.model_executor.{module}"), name))
    nn.Module.__init__(layer)
    return layer


RECURRENT = [
    ("layers.mamba.mamba_mixer", "MambaMixer"),
    ("layers.mamba.mamba_mixer2", "MambaMixer2"),
    ("layers.mamba.short_conv", "ShortConv"),
    ("layers.mamba.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"),
]


@pytest.mark.parametrize(("module", "name"), RECURRENT)
@pytest.mark.parametrize("first", [True, False])
def test_a_hybrids_recurrent_layers_are_left_as_stock(module: str, name: str, first: bool) -> None:
    from nwor_bench.plugin.layers import attention_layers

    layers, names = [attention_layer(), recurrent(module, name)], list(NAMES)
    if first:
        layers.reverse()
        names.reverse()
    runner = runner_with(dict(zip(NAMES, layers, strict=True)))
    found = attention_layers(runner)
    assert (found.staged, found.recurrent) == ([names[0]], [names[1]])
    runner.attn_groups = [[attention_group([names[0]])]]
    assert reason_of(runner) is None
    alone = runner_with({names[1]: recurrent(module, name)})
    assert reason_of(alone) == "recurrent_layers"


def test_a_sparse_indexer_is_refused_by_name() -> None:
    layer = recurrent("models.deepseek_v2", "DeepseekV32IndexerCache")
    assert reason_of(runner_with(two(layer))) == "sparse_indexer"


def test_a_models_own_module_is_refused_before_its_layers_are_told_apart() -> None:
    def named(module: str) -> Any:
        return type("Layer", (), {"__module__": module})()

    own = named("vllm.models.kimi_k3.nvidia.mla")
    layers = dict(zip(NAMES, [recurrent("models.deepseek_v2", "DeepseekV32IndexerCache"), own],
                      strict=True))  # fmt: skip
    assert reason_of(runner_with(layers)) == "own_attention:kimi_k3"
    layer = attention_layer()
    layer.impl = named("vllm.models.qwen4_exp.nvidia.qsa")
    assert reason_of(runner_with(two(layer))) == "own_attention:qwen4_exp"


def test_any_other_layer_without_an_implementation_is_refused_by_its_class() -> None:
    class Memory:
        pass

    assert reason_of(runner_with(two(Memory()))) == "layer_without_attention:Memory"


def test_a_fault_of_our_own_is_a_reason_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nwor_bench.plugin.runner_v2 import setup as gpu_setup

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(gpu_setup, "GpuStaging", no_memory)
    with caplog.at_level("ERROR", "vllm.nwor_bench"):
        assert reason_of(runner_with(two())) == "setup:OutOfMemoryError"
    assert "planted" in caplog.text


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
    from nwor_bench.plugin import refusals

    assert refusals.of_call("K", "V", positional, named) == reason
    bypassed = "attention:kv_cache_update_bypass"
    assert refusals.of_call(None, "V", positional, named) == bypassed
    assert refusals.of_call("K", None, positional, named) == bypassed
