"""JSON text, parsed and written: every fault of a text is a ValueError. Pure."""

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


def document(content: Any) -> str:
    """An indented JSON document that ends with a newline; it has no NaN."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
