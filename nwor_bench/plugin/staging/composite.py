"""vLLM's composite attention: one implementation for steps with an image mask, one for the rest.

Models whose image tokens see each other (Gemma 4) have it. Both implementations share the cache and
its write. The second is causal, an implementation like any other, and serves every step in which no
query sees a later image token: windows among them. A step's metadata say which one they are for.
"""

from typing import Any


def causal_implementation(impl: Any) -> Any:
    """The implementation that serves windows: of a composite the causal one, else `impl`."""
    return getattr(impl, "causal_impl", impl)


def causal_builder(builder: Any) -> type:
    """The class of the metadata builder that serves windows, of a builder at work."""
    return type(getattr(builder, "causal_builder", builder))


def causal_builder_of(backend: Any) -> type:
    """The same of a layer's backend."""
    builder: type = getattr(backend, "causal_backend_cls", backend).get_builder_cls()
    return builder


def has_image_mask(metadata: Any) -> bool:
    """True where a composite chose the implementation for image masks for this step."""
    return getattr(metadata, "_attention_backend_variant", 1) == 0
