"""JSON text, read and written; whatever is wrong with what is read is a ValueError. Pure."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """What the text holds.

    Raises ValueError for text that is not JSON, and for JSON nested deeper than Python's parser
    goes, of which `json.loads` makes a RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def document(content: Any) -> str:
    """An indented JSON document that ends with a newline; it has no NaN."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
