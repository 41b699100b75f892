"""GPUs that a run can be planned for: memory, bandwidth, and what decides vLLM's attention."""

import re
from dataclasses import dataclass
from enum import StrEnum

from nwor_bench.errors import ConfigError


class Device(StrEnum):
    """Kinds of devices that differ in the attention that vLLM chooses."""

    HOPPER = "hopper"
    """H100 and H200: FlashAttention 3."""
    BLACKWELL = "blackwell"
    """B200: FlashInfer."""
    AMPERE = "ampere"
    """Ampere, Ada and RTX 50: FlashAttention 2, which has neither sinks nor an fp8 cache."""
    CPU = "cpu"


def _plain(label: str) -> str:
    return re.sub(r"^nvidia|[^a-z0-9]", "", label.lower())


@dataclass(frozen=True)
class Card:
    """One GPU, or the CPU, whose memory is the machine's."""

    label: str
    device: Device
    memory_gib: int = 0
    """Memory as PyTorch reports it, rounded down."""
    gb_per_s: int = 0
    """Bandwidth of its memory."""

    @property
    def name(self) -> str:
        """The card's name in flags: rtx4090."""
        return _plain(self.label)

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes."""
        return self.memory_gib << 30


# Bandwidth: NVIDIA's pages, nvidia.com/en-us/data-center/l4, /l40s, /a100, /h100, /h200, /dgx-b200
# and nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090, 50-series/rtx-5090; SXM forms.
# Memory: "total capacity" in PyTorch's messages, 22.0 to 22.2 GiB on an L4 sold as 24 GB.
CARDS = (
    Card("L4", Device.AMPERE, 22, 300),
    Card("RTX 4090", Device.AMPERE, 23, 1_008),
    Card("RTX 5090", Device.AMPERE, 31, 1_792),
    Card("L40S", Device.AMPERE, 44, 864),
    Card("A100", Device.AMPERE, 79, 2_039),
    Card("H100", Device.HOPPER, 79, 3_350),
    Card("H200", Device.HOPPER, 139, 4_800),
    Card("B200", Device.BLACKWELL, 178, 8_000),
)
"""By memory; an A100 is that of 80 GB."""

CPU = Card("CPU", Device.CPU)

_NAMED = {card.name: card for card in (*CARDS, CPU)}


def card_named(flag: str, written: str) -> Card:
    """The card that `H100`, `h100` or `RTX 4090` names. Raises ConfigError."""
    if _plain(written) not in _NAMED:
        raise ConfigError.unknown(flag, written, _NAMED)
    return _NAMED[_plain(written)]
