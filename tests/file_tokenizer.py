"""A model folder's tokenizer without transformers, whose import takes seconds."""

import json
from functools import cache
from pathlib import Path
from typing import Any


class FileTokenizer:
    """tokenizer.json as the library behind transformers reads it, and its chat template."""

    def __init__(self, folder: str | Path):
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
        self.chat_template: str | None = config.get("chat_template")
        self._tokenizer = _read(Path(folder) / "tokenizer.json")

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._tokenizer.encode(text).ids)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> list[int]:
        """Ids of a conversation."""
        assert (tokenize, return_dict) == (True, False)
        assert self.chat_template is not None
        template = _compiled(self.chat_template)
        return self.encode(
            template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        )


@cache
def _read(file: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


@cache
def _compiled(chat_template: str) -> Any:
    import jinja2

    return jinja2.Template(chat_template, trim_blocks=True, lstrip_blocks=True)
