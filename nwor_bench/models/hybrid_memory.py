"""Memory that a model with recurrent layers reserves, as vLLM's cache configuration computes it.

vLLM keeps states and K/V in one pool of equal pages. A cache block has as many tokens as make their
K/V in one layer as large as a state's slot, and slots are padded to that size. A request holds
1 + k slots in each recurrent layer (`MambaSpec.num_speculative_blocks` = k), and whole blocks of
K/V. Left out: that vLLM fills up its groups of layers to one size, activations and graphs.
"""

from math import ceil

from nwor_bench.models.byte_model import ByteModel, Workload
from nwor_bench.models.recurrent import RecurrentLayers

KERNEL_BLOCK, LATENT_BLOCK = 16, 128
"""Tokens of which a cache block is a multiple: FlashAttention's, and with latent rows."""

MEMORY_SHARE = 0.92
"""vLLM's default `gpu_memory_utilization`."""

CARDS = {"H100": 79 << 30, "H200": 139 << 30}
"""Bytes of memory, as CUDA reports them."""


def cache_block(model: ByteModel, states: RecurrentLayers, load: Workload) -> int:
    """Tokens of a cache block, as vLLM's `_align_hybrid_block_size` chooses them."""
    unit = KERNEL_BLOCK if model.shape.mla is None else LATENT_BLOCK
    page = states.page_bytes(load.draft_tokens, load.ranks)
    return unit * ceil(page / (unit * _row(model, load)))


def padded_page(model: ByteModel, states: RecurrentLayers, load: Workload) -> float:
    """Bytes of a page: one layer's slot, or a block of its K/V."""
    return cache_block(model, states, load) * _row(model, load)


def reserved_states(model: ByteModel, states: RecurrentLayers, load: Workload, slots: int) -> float:
    """Bytes of one request's states, with that many slots a layer."""
    return slots * states.count * padded_page(model, states, load)


def requests_that_fit(
    memory: int, model: ByteModel, states: RecurrentLayers, load: Workload, slots: int
) -> int:
    """Requests whose states and K/V (context and window) fit beside the weights; 0 if none does."""
    tokens = load.context + load.draft_tokens + 1
    blocks = ceil(tokens / cache_block(model, states, load)) * len(model.shape.attending)
    request = reserved_states(model, states, load, slots)
    request += blocks * padded_page(model, states, load)
    return max(0, int((memory * MEMORY_SHARE - _weights(model, load.ranks)) // request))


def _row(model: ByteModel, load: Workload) -> float:
    """Bytes of one token's K/V in one layer."""
    return model.shape.cache_row_elements(load.ranks) * model.cache_bits / 8


def _weights(model: ByteModel, ranks: int) -> float:
    """Bytes of all weights on one rank, as `ByteModel.weights_read` counts their bits."""
    shape = model.shape
    experts = 0 if shape.experts is None else shape.experts.count
    embedding = 0 if shape.tied_embeddings else shape.vocab * shape.hidden / ranks
    plain = (shape.unquantised_parameters(ranks) + embedding) * model.activation_bits
    return (shape.block_parameters(experts, ranks) * model.weight_bits + plain) / 8
