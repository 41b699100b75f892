"""Architectures that vLLM 0.32 generates text with. Pure.

`generating.json` has the names of its registry: generating models, multimodal ones, and those
that it runs through Transformers. Encoders and drafters are not among them.
"""

import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("generating.json")


@cache
def generating() -> frozenset[str]:
    """The architectures, by the names that a config.json has for them."""
    return frozenset(json.loads(FILE.read_text(encoding="utf-8")))
