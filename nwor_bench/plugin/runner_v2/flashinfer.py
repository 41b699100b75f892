"""What FlashInfer's attention has otherwise than vLLM's other backends.

Its cache has their form, its write is a call of its own, and our attention reads the runner's own
inputs. But the package may be missing, so nothing is imported here. Its metadata hold plans of
kernels instead of one row for each request (`refusals.of_step`). And it quantises queries inside
of its attention, to another type for decodes than for prefills on a Hopper GPU.
"""

import sys
from typing import Any

from torch import Tensor

MODULE = "vllm.v1.attention.backends.flashinfer"


def implementations() -> tuple[type, ...]:
    """Its attention, where vLLM has imported it; no layer has it elsewhere."""
    module = sys.modules.get(MODULE)
    return () if module is None else (module.FlashInferImpl,)


def builders() -> tuple[type, ...]:
    """Its metadata builder, likewise."""
    module = sys.modules.get(MODULE)
    return () if module is None else (module.FlashInferMetadataBuilder,)


def query_as_stock(impl: Any, layer: Any, query: Tensor, metadata: Any) -> Tensor:
    """The step's queries in the type in which stock attention would use those of windows.

    vLLM serves windows as decodes where a kernel of FlashInfer takes several queries a request
    (XQA, trtllm-gen), else as prefills. Then no decode has more than one query.

    Args:
        impl: FlashInfer's implementation.
        layer: vLLM's attention module.
        query: [num_tokens, heads, head_dim].
        metadata: FlashInfer's, of a step with a window.
    """
    windows_decode = metadata.num_decode_tokens > metadata.num_decodes
    dtype = metadata.q_data_type_decode if windows_decode else metadata.q_data_type_prefill
    quantised: Tensor = impl.maybe_quant_query(query, dtype, layer._q_scale)
    return quantised
