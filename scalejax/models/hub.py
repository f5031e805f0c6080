"""Weights in safetensors: files in the network's own names, and model folders of a hub.

A folder holds `config.json` and the tensors of a PyTorch network under its names; those of GPT-2
and the Llama family (Llama, Mistral, Qwen2, Qwen3) are assembled into the parameters of scalejax's
networks. Knows names and layouts of arrays; nothing of training. Nothing is downloaded, and nothing
that is read can run.

Source: the format of github.com/huggingface/safetensors ("Format"), names and layouts of
github.com/huggingface/transformers (`modeling_gpt2.py`, `modeling_llama.py`).
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from scalejax.config.model import DecoderConfig, GptConfig, LlamaConfig, ModelConfig
from scalejax.core.errors import ConfigError, refusal

INDEX = "model.safetensors.index.json"
"""The file that says which file of a folder holds which tensor, if there are several files."""
_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "U32": np.uint32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LARGEST_HEADER = 100_000_000
"""Bytes of a header; the format's own library refuses more."""
_BUFFERS = ("attn.bias", "attn.masked_bias", "rotary_emb.inv_freq")
"""Name endings of buffers that older versions of transformers stored and no network learns."""
_LLAMAS = ("llama", "mistral", "qwen2", "qwen3")

Index = tuple[slice, ...]


class Part(NamedTuple):
    """One parameter of a network, as stored in a file."""

    shape: tuple[int, ...]
    """Its whole shape."""
    read: Callable[[Index], np.ndarray]
    """Reads a part of it, in the type of the file."""


def whole(array: np.ndarray) -> Part:
    """An array as it is."""
    return Part(array.shape, lambda index: array[index])


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by their names, mapped and not read yet.

    Raises:
        ConfigError: if it cannot be read, or is not such a file.
    """
    try:
        data = np.memmap(path, np.uint8, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        if not 0 < size <= min(_LARGEST_HEADER, len(data) - 8):
            raise ValueError("its header is longer than the file")
        header = json.loads(data[8 : 8 + size].tobytes())
        return {
            name: _array(data, 8 + size, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as safetensors: {error}.") from error


def _array(data: np.ndarray, start: int, entry: Mapping[str, Any]) -> np.ndarray:
    dtype, shape = np.dtype(_TYPES[entry["dtype"]]), tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    count = math.prod(shape)
    if not 0 <= begin <= end <= len(data) - start or end - begin != count * dtype.itemsize:
        raise ValueError("a tensor is not where its header says")
    return np.frombuffer(data, dtype, count, start + begin).reshape(shape)


def files_of(folder: Path) -> list[Path]:
    """The files of tensors of a model's folder, in order of names.

    Raises:
        ConfigError: if there are none, or the index cannot be read.
    """
    if (index := folder / INDEX).is_file():
        try:
            named = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{str(index)!r} cannot be read: {error}.") from error
        if any(Path(name).name != name for name in named):
            raise ConfigError(f"{str(index)!r} names files outside of its folder.")
        return [folder / name for name in sorted(named)]
    if (single := folder / "model.safetensors").is_file():
        return [single]
    accepted = "no model.safetensors and no index of several (PyTorch's pickles are not read)"
    raise ConfigError(f"{str(folder)!r} holds {accepted}.")


def hub_parts(folder: Path, model: ModelConfig) -> dict[str, Part]:
    """The parameters of `model` in a model's folder, by their paths in the network; any other
    tensor by its own name.

    Raises:
        ConfigError: if `model` is no such network, or differs from what `config.json` says.
    """
    try:
        described = json.loads((folder / "config.json").read_text())
        kind = str(described["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(folder / 'config.json')!r} cannot be read: {error}.") from error
    if isinstance(model, DecoderConfig) and not model.is_base:
        accepted = (
            "weights of a hub are of no parametrization; here it must be at its base, or absent"
        )
        name = model.parametrization.name if model.parametrization else None
        raise ConfigError(refusal("model.parametrization.name", name, accepted))
    tensors: dict[str, np.ndarray] = {}
    for path in files_of(folder):
        tensors |= read_safetensors(path)
    if kind == "gpt2" and isinstance(model, GptConfig):
        _require_same(folder, _gpt2_fields(model), described, {"activation_function": "gelu_new"})
        parts, layers, prefix = _gpt2(model), model.layers, "transformer."
    elif kind in _LLAMAS and isinstance(model, LlamaConfig):
        _require_same(folder, _llama_fields(model, kind), _flat(described), _LLAMA_DEFAULTS)
        parts, layers, prefix = _llama(model), model.layers, "model."
    else:
        accepted = f'{folder} holds a network of kind "{kind}": gpt reads "gpt2", and llama '
        accepted += ", ".join(f'"{each}"' for each in _LLAMAS)
        raise ConfigError(refusal("model.name", model.name, accepted))
    bare = {name.removeprefix(prefix): each for name, each in tensors.items()}
    if model.tied_embeddings:
        bare.pop("lm_head.weight", None)
    return _put_together(parts, bare, layers)


Recipe = tuple[tuple[str, ...], Callable[..., np.ndarray]]
"""Names of the tensors of a parameter, with `{}` for the layer, and how they are combined."""


def _put_together(
    recipes: Mapping[str, Recipe], tensors: dict[str, np.ndarray], layers: int
) -> dict[str, Part]:
    found: dict[str, Part] = {}
    used: set[str] = set()
    for path, (names, made) in recipes.items():
        is_stacked = "{}" in names[0]
        of_layers = [
            [name.format(layer) for name in names] for layer in range(layers if is_stacked else 1)
        ]
        if any(name not in tensors for of_layer in of_layers for name in of_layer):
            continue
        used.update(name for of_layer in of_layers for name in of_layer)
        found[path] = _part(of_layers, made, tensors, is_stacked=is_stacked)
    for name, array in tensors.items():
        if name not in used and not name.endswith(_BUFFERS):
            found[name] = whole(array)
    return found


def _part(
    of_layers: list[list[str]],
    made: Callable[..., np.ndarray],
    tensors: Mapping[str, np.ndarray],
    *,
    is_stacked: bool,
) -> Part:
    def of_layer(layer: int) -> np.ndarray:
        return made(*(tensors[name] for name in of_layers[layer]))

    if not is_stacked:
        return whole(of_layer(0))

    def read(index: Index) -> np.ndarray:
        """Layer by layer: all layers of a large network together would fit in no memory."""
        chosen = range(len(of_layers))[index[0]]
        return np.stack([of_layer(layer)[index[1:]] for layer in chosen])

    return Part((len(of_layers), *of_layer(0).shape), read)


def _as_is(array: np.ndarray) -> np.ndarray:
    return array


def _gpt2(model: GptConfig) -> dict[str, Recipe]:
    """Recipes for `Conv1D` layers, whose matrices are [in, out] as here."""
    heads, size = model.heads, model.hidden // model.heads
    block = {
        "attention_norm/scale": "ln_1.weight",
        "attention_norm/bias": "ln_1.bias",
        "attention/projection/kernel": "attn.c_proj.weight",
        "attention/projection/bias": "attn.c_proj.bias",
        "feed_forward_norm/scale": "ln_2.weight",
        "feed_forward_norm/bias": "ln_2.bias",
        "feed_forward/up/kernel": "mlp.c_fc.weight",
        "feed_forward/up/bias": "mlp.c_fc.bias",
        "feed_forward/down/kernel": "mlp.c_proj.weight",
        "feed_forward/down/bias": "mlp.c_proj.bias",
    }
    of_heads = {"kernel": "attn.c_attn.weight", "bias": "attn.c_attn.bias"}
    return {
        "tokens/embedding": (("wte.weight",), _as_is),
        "places/embedding": (("wpe.weight",), _as_is),
        "output/embedding": (("lm_head.weight",), _as_is),
        "norm/scale": (("ln_f.weight",), _as_is),
        "norm/bias": (("ln_f.bias",), _as_is),
        **{f"blocks/{path}": ((f"h.{{}}.{name}",), _as_is) for path, name in block.items()},
        **{
            f"blocks/attention/qkv/{path}": (
                (f"h.{{}}.{name}",),
                lambda array: array.reshape(*array.shape[:-1], 3, heads, size),
            )
            for path, name in of_heads.items()
        },
    }


def _llama(model: LlamaConfig) -> dict[str, Recipe]:
    """Recipes for `nn.Linear` layers, whose matrices are [out, in]."""
    groups, size = model.kv_heads, model.head_size

    def heads(*arrays: np.ndarray) -> np.ndarray:
        """[in, G, N, K] of queries, keys and values [out, in], or [G, N, K] of biases."""
        split = [array.T.reshape(*array.shape[1:], groups, -1, size) for array in arrays]
        return np.concatenate(split, axis=-2)

    def gated(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.stack([gate.T, up.T], axis=1)

    def transposed(array: np.ndarray) -> np.ndarray:
        return array.T

    layer = "layers.{}."
    attention, inner = f"{layer}self_attn.", f"{layer}mlp."
    of_heads = {
        kind: tuple(f"{attention}{each}_proj.{name}" for each in "qkv")
        for kind, name in (("kernel", "weight"), ("bias", "bias"))
    }
    return {
        "tokens/embedding": (("embed_tokens.weight",), _as_is),
        "output/embedding": (("lm_head.weight",), _as_is),
        "norm/scale": (("norm.weight",), _as_is),
        "blocks/attention_norm/scale": ((f"{layer}input_layernorm.weight",), _as_is),
        "blocks/feed_forward_norm/scale": ((f"{layer}post_attention_layernorm.weight",), _as_is),
        "blocks/attention/qkv/kernel": (of_heads["kernel"], heads),
        "blocks/attention/qkv/bias": (of_heads["bias"], heads),
        "blocks/attention/q_norm/scale": ((f"{attention}q_norm.weight",), _as_is),
        "blocks/attention/k_norm/scale": ((f"{attention}k_norm.weight",), _as_is),
        "blocks/attention/projection/kernel": ((f"{attention}o_proj.weight",), transposed),
        "blocks/feed_forward/gated/kernel": (
            (f"{inner}gate_proj.weight", f"{inner}up_proj.weight"),
            gated,
        ),
        "blocks/feed_forward/down/kernel": ((f"{inner}down_proj.weight",), transposed),
    }


# Comparison of config.json with the fields of the model.


class _Field(NamedTuple):
    """A field of the model, and its value, which an entry of `config.json` must equal."""

    name: str
    value: Any


def _gpt2_fields(model: GptConfig) -> dict[str, _Field]:
    return {
        "n_layer": _Field("model.layers", model.layers),
        "n_embd": _Field("model.hidden", model.hidden),
        "n_head": _Field("model.heads", model.heads),
        "n_inner": _Field("model.ffn_hidden", model.ffn_hidden),
        "activation_function": _Field("its activation", "gelu_new"),
        "layer_norm_epsilon": _Field("its epsilon", 1e-5),
        "tie_word_embeddings": _Field("model.tied_embeddings", model.tied_embeddings),
        "scale_attn_weights": _Field("its scale of attention", True),
        "scale_attn_by_inverse_layer_idx": _Field("its scale by layer", False),
    }


_LLAMA_DEFAULTS = {"hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10_000.0}
"""Defaults of transformers' `LlamaConfig`."""


def _llama_fields(model: LlamaConfig, kind: str) -> dict[str, _Field]:
    block = model.block
    fields = {
        "num_hidden_layers": _Field("model.layers", model.layers),
        "hidden_size": _Field("model.hidden", model.hidden),
        "intermediate_size": _Field("model.ffn_hidden", model.ffn_hidden),
        "num_attention_heads": _Field("model.heads", model.heads),
        "num_key_value_heads": _Field("model.kv_heads", model.kv_heads),
        "rms_norm_eps": _Field("model.norm_epsilon", model.norm_epsilon),
        "rope_theta": _Field("model.rope_theta", model.rope_theta),
        "hidden_act": _Field("model.block.activation", block.activation),
        "tie_word_embeddings": _Field("model.tied_embeddings", model.tied_embeddings),
        "rope_type": _Field("its scaling of angles", "default"),
    }
    if kind == "mistral":
        fields["sliding_window"] = _Field("model.block.sliding_window", block.sliding_window)
    return fields


def _flat(described: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` with its rotary settings at the top level, whichever version wrote it."""
    heads = described.get("num_attention_heads")
    flat: dict[str, Any] = {"num_key_value_heads": heads, **described}
    for table in ("rope_scaling", "rope_parameters"):
        if isinstance(said := described.get(table), dict):
            flat |= {"rope_type": said.get("type"), **said}
    if flat.get("use_sliding_window") and flat.get("model_type") != "mistral":
        flat["rope_type"] = "sliding windows"
    return {"rope_type": "default", **flat}


def _require_same(
    folder: Path,
    fields: Mapping[str, _Field],
    described: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> None:
    """Refuse a field that differs from `config.json`, if that has an entry for it."""
    for entry, (name, value) in fields.items():
        said = described.get(entry, defaults.get(entry))
        is_absent = said is None and entry not in ("sliding_window",)
        if not is_absent and said != value and not (entry == "n_inner" and value is None):
            where = f"{folder / 'config.json'} says {entry} = {json.dumps(said)}"
            if name.startswith("model."):
                raise ConfigError(refusal(name, value, f"{where}; start.weights needs the same"))
            raise ConfigError(f"start.weights is refused: {where}; here {name} is {value!r}.")
