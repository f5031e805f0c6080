"""A tree of gradients as a list of layers, for methods that work layer by layer."""

import jax
from jax.tree_util import tree_flatten_with_path, tree_unflatten

from scalejax.models import parameter_path
from scalejax.training.gradient_sync.device_rows import PyTree


def layers_of(tree: PyTree, stacked: tuple[str, ...]) -> list[jax.Array]:
    """Each leaf as [layers, entries]: one layer, unless its first dimension counts layers.

    Args:
        tree: by the paths of parameters.
        stacked: first parts of the paths of parameters whose first dimension counts layers.
    """
    leaves, _ = tree_flatten_with_path(tree)
    return [
        leaf.reshape(leaf.shape[0] if parameter_path(path).split("/")[0] in stacked else 1, -1)
        for path, leaf in leaves
    ]


def from_layers(layers: list[jax.Array], like: PyTree) -> PyTree:
    """The inverse of `layers_of`: a tree with the structure and shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    shaped = [layer.reshape(leaf.shape) for layer, leaf in zip(layers, leaves, strict=True)]
    return tree_unflatten(structure, shaped)
