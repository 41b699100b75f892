"""What a model pair is: the file that describes it, and what an engine needs to load it."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from nwor_bench.errors import ConfigError
from nwor_bench.workload.toml_file import StrictModel

Method = Literal["ngram", "draft_model", "eagle", "eagle3"]
METHODS: tuple[Method, ...] = ("ngram", "draft_model", "eagle", "eagle3")
"""Ways of drafting; all but ngram (prompt lookup) need a drafter."""

_SHA256 = r"^[0-9a-f]{64}$"


class PackagedSource(StrictModel):
    """A GGUF model inside a wheel of the package registry, both pinned by SHA-256.

    `drafter` is a folder beside the pair's file, with a drafter for that model.
    """

    package: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    version: str = Field(pattern=r"^[A-Za-z0-9.+!_-]+$")
    wheel_sha256: str = Field(pattern=_SHA256)
    member: str = Field(min_length=1)
    member_sha256: str = Field(pattern=_SHA256)
    drafter: str | None = None


class GeneratedSource(StrictModel):
    """Shape, seed and drafter noise of a pair written by `generate_tiny`."""

    seed: int = Field(ge=0)
    noise: float = Field(ge=0)
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab: int = Field(ge=261)
    max_positions: int = Field(ge=1)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"write heads as a multiple of kv_heads ({self.kv_heads})")
        return self


class ShapeSource(StrictModel):
    """config.json of a target, and of its drafter, without weights: vLLM makes up random ones."""

    target: dict[str, Any]
    draft: dict[str, Any] | None = None


class FolderSource(StrictModel):
    """Models that exist already: each a local folder or a hub name such as org/name."""

    target: str
    draft: str | None = None


class ModelPair(StrictModel):
    """One scenarios/pairs/NAME.toml: where target and drafter come from, how they draft.

    `speculative` holds further settings that vLLM's speculative_config takes for `method`.
    Exactly the table that `source` names is present.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str
    source: Literal["packaged", "generated", "shape", "folder"]
    method: Method
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    speculative: dict[str, int | float | str | bool] = Field(default_factory=dict)
    packaged: PackagedSource | None = None
    generated: GeneratedSource | None = None
    shape: ShapeSource | None = None
    folder: FolderSource | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        tables = {
            "packaged": self.packaged,
            "generated": self.generated,
            "shape": self.shape,
            "folder": self.folder,
        }
        present = [name for name, table in tables.items() if table is not None]
        if present != [self.source]:
            found = ", ".join(present) or "none"
            raise ValueError(f'write one table [{self.source}] for source = "{self.source}", '
                             f"and no other (found: {found})")  # fmt: skip
        return self


@dataclass(frozen=True)
class ResolvedPair:
    """A pair that is ready to load. `target` and `draft` are absolute folders or hub names.

    `load_format` is vLLM's: "dummy" for a shape without weights; None is its default.
    """

    name: str
    method: str
    target: str
    draft: str | None
    dtype: str
    speculative: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    load_format: str | None = None

    def speculative_config(self, draft_tokens: int) -> dict[str, Any]:
        """vLLM's speculative_config for `draft_tokens` drafts a window.

        Raises ConfigError when `draft_tokens` is not at least 1.
        """
        if isinstance(draft_tokens, bool) or draft_tokens < 1:
            raise ConfigError.for_field(
                "draft_tokens", draft_tokens, "write the number of drafts a window, 1 or more"
            )
        config = {**self.speculative, "method": self.method, "num_speculative_tokens": draft_tokens}
        return config if self.draft is None else {**config, "model": self.draft}
