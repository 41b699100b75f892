"""The names of vLLM that `plugin` and `engine` import, wrap or read.

A member is named by the class through which it is reached; where vLLM moves it to a base class or
another module, the name stays. A test reads the imports and patches of both packages and holds this
list complete in them; what is read from objects is listed by hand.
"""

NAMES: dict[str, tuple[str, ...]] = {
    # The engine, from outside.
    "vllm": (
        "EngineArgs",
        "EngineArgs.create_engine_config",
        "LLM",
        "LLM.collective_rpc",
        "LLM.generate",
        "LLM.get_metrics",
        "LLM.llm_engine",
        "LLM.reset_prefix_cache",
        "SamplingParams",
    ),
    "vllm.outputs": ("CompletionOutput.*", "RequestOutput.__init__"),
    "vllm.platforms": ("current_platform",),
    "vllm.plugins": ("load_plugins_by_group",),
    "vllm.transformers_utils.config": ("get_config",),
    "vllm.v1.engine.llm_engine": ("LLMEngine.engine_core", "LLMEngine.logger_manager"),
    "vllm.v1.metrics.loggers": (
        "StatLoggerManager.record",
        "StatLoggerManager.stat_loggers",
    ),
    "vllm.v1.metrics.stats": (
        "IterationStats.inter_token_latencies_iter",
        "RequestStateStats.*",
    ),
    # What a step is told by the scheduler.
    "vllm.v1.core.sched.output": (
        "CachedRequestData.*",
        "GrammarOutput.num_acceptable_drafts",
        "GrammarOutput.structured_output_request_ids",
        "NewRequestData.*",
        "SchedulerOutput.finished_req_ids",
        "SchedulerOutput.num_invalid_spec_tokens",
        "SchedulerOutput.pending_structured_output_tokens",
        "SchedulerOutput.scheduled_cached_reqs",
        "SchedulerOutput.scheduled_new_reqs",
        "SchedulerOutput.scheduled_spec_decode_tokens",
        "SchedulerOutput.total_num_scheduled_tokens",
    ),
    # Where the plugin is attached.
    "vllm.platforms.cpu": ("CpuPlatform.register_triton_kernel_overrides",),
    "vllm.platforms.interface": (
        "Platform.is_cpu",
        "Platform.is_cuda",
        "Platform.register_triton_kernel_overrides",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
    "vllm.v1.worker.cpu_worker": ("CPUWorker", "CPUWorker.compile_or_warm_up_model"),
    "vllm.v1.worker.gpu_worker": ("Worker", "Worker.compile_or_warm_up_model"),
    "vllm.distributed.parallel_state": ("get_tp_group",),
    # The V2 runner and its CUDA graphs.
    "vllm.v1.worker.gpu.model_runner": (
        "GPUModelRunner.adaptive_verification",
        "GPUModelRunner.attn_groups",
        "GPUModelRunner.block_tables",
        "GPUModelRunner.cudagraph_manager",
        "GPUModelRunner.dcp_size",
        "GPUModelRunner.draft_tokens_handler",
        "GPUModelRunner.execute_model",
        "GPUModelRunner.input_buffers",
        "GPUModelRunner.intermediate_tensors",
        "GPUModelRunner.kv_cache_config",
        "GPUModelRunner.lora_config",
        "GPUModelRunner.max_num_reqs",
        "GPUModelRunner.model_state",
        "GPUModelRunner.num_speculative_steps",
        "GPUModelRunner.pcp_manager",
        "GPUModelRunner.prepare_attn",
        "GPUModelRunner.sample",
        "GPUModelRunner.sample_tokens",
        "GPUModelRunner.speculator",
        "GPUModelRunner.ubatch_runner",
        "GPUModelRunner.use_aux_hidden_state_outputs",
        "GPUModelRunner.use_pp",
    ),
    "vllm.v1.worker.gpu.input_batch": (
        "InputBatch.num_draft_tokens",
        "InputBatch.num_draft_tokens_per_req",
        "InputBatch.num_reqs",
        "InputBatch.num_tokens",
        "InputBatch.query_start_loc_np",
        "InputBatch.req_ids",
    ),
    "vllm.v1.worker.gpu.spec_decode.utils": ("DraftTokensHandler.req_ids",),
    "vllm.v1.worker.gpu.spec_decode.speculator": (
        "DraftModelSpeculator.draft_attn_layer_names",
        "DraftModelSpeculator.propose",
    ),
    "vllm.v1.worker.gpu.cudagraph_utils": (
        "BatchExecutionDescriptor",
        "BatchExecutionDescriptor.*",
        "ModelCudaGraphManager",
        "ModelCudaGraphManager.__init__",
        "ModelCudaGraphManager._capture_descs",
        "ModelCudaGraphManager.capture",
        "ModelCudaGraphManager.decode_query_len",
        "ModelCudaGraphManager.dispatch",
        "ModelCudaGraphManager.graphs",
        "ModelCudaGraphManager.hidden_states",
        "ModelCudaGraphManager.run_fullgraph",
        "ModelCudaGraphManager.use_breakable_cg",
        "ModelCudaGraphManager.varlen_decode",
    ),
    "vllm.compilation.breakable_cudagraph": ("is_breakable_cudagraph_enabled",),
    "vllm.config": (
        "CompilationMode",
        "ModelConfig",
        "ModelConfig.get_vocab_size",
        "ModelConfig.rswa_window",
    ),
    "vllm.config.speculative": (
        "SpeculativeConfig.method",
        "SpeculativeConfig.rejection_sample_method",
        "SpeculativeConfig.synthetic_acceptance_length",
        "SpeculativeConfig.synthetic_acceptance_rates",
        "SpeculativeConfig.uses_draft_kv_cache",
    ),
    "vllm.config.compilation": (
        "CUDAGraphMode",
        "CUDAGraphMode.*",
        "CompilationConfig.pass_config",
        "CompilationConfig.splitting_ops",
        "CompilationConfig.static_forward_context",
        "CompilationConfig.use_inductor_graph_partition",
    ),
    # The V1 runner.
    "vllm.forward_context": ("ForwardContext.slot_mapping", "get_forward_context"),
    "vllm.v1.worker.gpu_model_runner": (
        "GPUModelRunner",
        "GPUModelRunner._draft_token_req_ids",
        "GPUModelRunner._model_forward",
        "GPUModelRunner._sample",
        "GPUModelRunner.discard_request_mask",
        "GPUModelRunner.drafter",
        "GPUModelRunner.execute_model",
        "GPUModelRunner.num_spec_tokens",
        "GPUModelRunner.propose_draft_token_ids",
        "GPUModelRunner.query_start_loc",
        "GPUModelRunner.sample_tokens",
        "GPUModelRunner.use_async_scheduling",
    ),
    # Attention: the write, the read, and the metadata of a step.
    "vllm.model_executor.layers.attention.attention": (
        "Attention.impl",
        "Attention.kv_cache",
        "Attention.kv_cache_update_bypass",
        "unified_attention_with_output",
        "unified_kv_cache_update",
    ),
    "vllm.v1.attention.backend": ("AttentionType",),
    "vllm.v1.attention.backends.cpu_attn": (
        "CPUAttentionBackend",
        "CPUAttentionBackendImpl",
        "CPUAttentionBackendImpl.__init__",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        "CPUAttentionBackendImpl.forward",
        "CPUAttentionMetadata",
        "CPUAttentionMetadata.*",
        "CPUAttentionMetadataBuilder",
    ),
    "vllm.v1.attention.backends.flash_attn": (
        "FlashAttentionImpl",
        "FlashAttentionImpl.do_kv_cache_update",
        "FlashAttentionImpl.forward",
        "FlashAttentionMetadata.*",
        "FlashAttentionMetadataBuilder",
        "FlashAttentionMetadataBuilder.build",
    ),
    "vllm.v1.attention.backends.triton_attn": (
        "TritonAttentionImpl",
        "TritonAttentionImpl.do_kv_cache_update",
        "TritonAttentionImpl.forward",
        "TritonAttentionMetadata.*",
        "TritonAttentionMetadataBuilder",
        "TritonAttentionMetadataBuilder.build",
    ),
    "vllm.model_executor.layers.mamba.abstract": (
        "MambaBase",
        "MambaBase.get_state_dtype",
        "MambaBase.get_state_shape",
    ),
    # Which blocks attention may read: freed ones of a sliding window are nulled from 0.33 on.
    "vllm.v1.worker.gpu.block_table": ("BlockTables.gather_block_tables",),
    "vllm.v1.kv_cache_interface": ("KVCacheConfig.*", "KVCacheGroupSpec.*"),
    # What kernels are compared with.
    "vllm.v1.attention.ops.triton_reshape_and_cache_flash": ("triton_reshape_and_cache_flash",),
    "vllm.vllm_flash_attn.flash_attn_interface": (
        "flash_attn_varlen_func",
        "get_scheduler_metadata",
    ),
    # Random weights.
    "vllm.model_executor.layers.layernorm": ("GemmaRMSNorm",),
    "vllm.model_executor.layers.linear": ("QKVParallelLinear", "RowParallelLinear"),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("VocabParallelEmbedding",),
    "vllm.model_executor.model_loader": ("register_model_loader",),
    "vllm.model_executor.model_loader.dummy_loader": (
        "DummyModelLoader",
        "DummyModelLoader.load_weights",
    ),
}


def all_names() -> tuple[str, ...]:
    """Every name as `module:name` or `module:Class.member`, in order."""
    return tuple(f"{module}:{name}" for module, names in NAMES.items() for name in names)
