"""Parse JSON from files: every fault is a ValueError. Pure."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The parsed value of the text.

    Raises ValueError for text that is not JSON, and for JSON nested deeper than Python's parser
    goes, of which `json.loads` makes a RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
