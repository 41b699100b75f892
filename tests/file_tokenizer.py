"""A model folder's tokenizer without transformers, whose import takes seconds."""

import json
from pathlib import Path


class FileTokenizer:
    """tokenizer.json as the library behind transformers reads it, and its chat template."""

    def __init__(self, folder: str | Path):
        from tokenizers import Tokenizer

        config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
        self.chat_template: str | None = config.get("chat_template")
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

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
        import jinja2

        assert (tokenize, return_dict) == (True, False)
        assert self.chat_template is not None
        template = jinja2.Template(self.chat_template, trim_blocks=True, lstrip_blocks=True)
        return self.encode(
            template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        )
