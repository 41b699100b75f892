"""Verification attention: a window's queries over committed and staged K/V."""

from nwor_kernels.verify_attention.reference import (
    AttentionPlan,
    plan_attention,
    verify_attention_reference,
)

__all__ = ["AttentionPlan", "plan_attention", "verify_attention_reference"]
