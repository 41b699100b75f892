"""The arguments that vLLM needs for a LoRA adapter."""

from pathlib import Path
from typing import get_args

import pytest
from refusals import refused

from nwor_bench.models.adapter import RANKS, lora_arguments


@pytest.mark.parametrize(("rank", "largest"), [(1, 1), (2, 8), (8, 8), (17, 32), (512, 512)])
def test_the_engine_has_room_for_the_adapters_rank(tmp_path: Path, rank: int, largest: int) -> None:
    (tmp_path / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    assert lora_arguments(str(tmp_path)) == {"enable_lora": True, "max_lora_rank": largest}


@pytest.mark.parametrize("text", [None, "{", "{}", "[]", '{"r": "8"}', '{"r": 513}'])
def test_a_folder_without_an_adapter_that_vllm_takes_is_refused(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "adapter_config.json").write_text(text)
    with refused("--lora", value=str(tmp_path)):
        lora_arguments(str(tmp_path))


@pytest.mark.slow  # imports vLLM
def test_ranks_are_vllms() -> None:
    from vllm.config import lora

    assert get_args(lora.MaxLoRARanks) == RANKS
