"""JSON files as people like to read them."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
