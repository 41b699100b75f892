"""JSON text, parsed and written: every fault of a text is a ValueError. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from nwor_bench import __version__

RESULT_VERSION = 1
"""Of the keys of results on stdout; it rises when one goes or changes its meaning."""


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


def result_document(content: Mapping[str, Any]) -> str:
    """A command's result as JSON, headed by its version and ours."""
    return document({"result_version": RESULT_VERSION, "nwor_bench": __version__, **content})
