"""Latent attention (MLA) on a CPU: vLLM's reference backend, whose write can stage.

It runs every request with more than one row as a prefill, which takes the step's own latents from
the activations and the context before them from the cache. So a window never reads what it writes,
and attention stays vLLM's in both modes.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from nwor_bench.plugin.runner_v1.cpu_attention import LayerStaging
from nwor_bench.plugin.staging import refusals


class StagingCPUMLAImpl(CPUMLAImpl):
    """Stages on layers that the runner hook chose."""

    staging: LayerStaging | None = None
    """Set by the runner hook on target layers only; drafter layers keep None."""

    why_stock: str | None = None
    """Nothing that vLLM's backend serves is left to it alone."""

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Write the step's rows, but stage the window's drafts when a window is open."""
        staging = self.staging
        if staging is not None and staging.window.is_staging:
            batch = staging.window.batch
            latent = kv_c_normed.unsqueeze(1)
            staged = staging.window.stage(staging.layer, latent, k_pe)
            if staged and staging.buffers.trace is not None:
                staging.buffers.trace.wrote(staging.name, latent, k_pe)
            if staged and batch is not None and not staging.window.is_control:
                slot_mapping = batch.direct_slots_of[staging.slot_row]
        rows = slot_mapping.shape[0]  # what follows is padding
        super().do_kv_cache_update(
            kv_c_normed[:rows], k_pe[:rows], kv_cache, slot_mapping, kv_cache_dtype, k_scale
        )

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Attention of windows and prefills; see vLLM for shapes."""
        self._guard(attn_metadata)
        step = (q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata)
        super().forward_mha(*step, *args, **kwargs)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of requests with one row; see vLLM for shapes."""
        self._guard(attn_metadata)
        return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)

    def _guard(self, metadata: Any) -> None:
        """Write the window directly, before the cache is read, if this step reads its rows."""
        staging = self.staging
        if staging is None or not staging.window.is_staging:
            return
        window, reason = staging.window, None
        if not window.has_staged(staging.layer):
            reason = refusals.NOT_STAGED
        elif window.batch is not None:
            drafts = window.batch.num_draft_tokens
            reason = refusals.of_latent_step(metadata, drafts, windows_decode=False)
        if reason is not None:
            window.abort(reason)


class StagingCPUMLABackend(CPUMLABackend):
    """The stock CPU backend of latent attention with our implementation behind it."""

    @staticmethod
    def get_impl_cls() -> type[CPUMLAImpl]:
        """The implementation that can stage."""
        return StagingCPUMLAImpl
