"""Kernels of nwor-bench, registered as `torch.library` operators in the namespace `nwor`.

One folder an operator: `reference.py` is the readable torch definition that every faster
implementation is tested against. Importing this package registers the operators.
"""

from nwor_kernels import mla_verify_attention, verify_attention
from nwor_kernels.commit import commit_staged_kv_cache
from nwor_kernels.mask import acceptance_mask, acceptance_mask_from_counts
from nwor_kernels.stage import stage_kv_cache

__all__ = [
    "acceptance_mask",
    "acceptance_mask_from_counts",
    "commit_staged_kv_cache",
    "mla_verify_attention",
    "stage_kv_cache",
    "verify_attention",
]
