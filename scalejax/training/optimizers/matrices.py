"""The hidden matrices of a network: which parameters they are, and arrays as stacks of matrices.

Knows paths and shapes of parameters; nothing of what optimizers do with matrices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import tree_map_with_path

from scalejax.models import parameter_path

_ENDS = ("output", "patches")
"""First parts of paths of the layers that read the input or make the logits; "head" may be any."""


@dataclass(frozen=True, slots=True)
class MatrixAxes:
    """The dimensions of an array that holds matrices."""

    batch: tuple[int, ...]
    """Those that count matrices: layers, experts, matrices side by side."""
    rows: tuple[int, ...]
    """Those of the input of a layer, in order, whose product is the rows."""
    columns: tuple[int, ...]
    """Those of its output."""

    def as_matrices(self, leaf: jax.Array) -> jax.Array:
        """The array as [*batch, rows, columns]."""
        moved = leaf.transpose(*self.batch, *self.rows, *self.columns)
        batch = moved.shape[: len(self.batch)]
        rows = math.prod(leaf.shape[axis] for axis in self.rows)
        return moved.reshape(*batch, rows, -1)

    def as_array(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The array of this shape, from [*batch, rows, columns]."""
        order = (*self.batch, *self.rows, *self.columns)
        moved = matrices.reshape([shape[axis] for axis in order])
        return moved.transpose([order.index(axis) for axis in range(len(shape))])

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the matrices of an array of this shape."""
        rows, columns = (
            math.prod(shape[axis] for axis in axes) for axes in (self.rows, self.columns)
        )
        return rows, columns


@dataclass(frozen=True, slots=True)
class HiddenMatrices:
    """Which parameters of a network are hidden matrices."""

    stacked: tuple[str, ...]
    """`Network.stacked`."""
    fused: tuple[tuple[str, int], ...] = ()
    """`Network.fused`."""
    output_layers: tuple[str, ...] = ()
    """`Network.output_layers`."""

    def axes(self, path: tuple[Any, ...], leaf: Any) -> MatrixAxes | None:
        """The dimensions of the matrices of a parameter; None if it is not a hidden matrix."""
        *parts, last = parameter_path(path).split("/")
        if last != "kernel" or not parts or parts[0] in _ENDS:
            return None
        if "head" in parts or "/".join(parts) in self.output_layers:
            return None
        if "depthwise" in parts:
            return None  # a filter per channel: by shape alone it could be a first layer
        is_stacked = parts[0] in self.stacked
        batch = list(range(is_stacked + ("experts" in parts)))
        rest = list(range(len(batch), len(leaf.shape)))
        if (place := dict(self.fused).get(parts[-1])) is not None:
            batch.append(rest.pop(place))
        if len(rest) < 2:
            return None
        is_convolution = len(rest) == 4 and not is_stacked
        split = -1 if is_convolution or parts[-1] == "projection" else 1
        return MatrixAxes(tuple(batch), tuple(rest[:split]), tuple(rest[split:]))

    def is_matrix(self, params: Any) -> Any:
        """True for hidden matrices, in a tree of parameters."""
        return tree_map_with_path(lambda *leaf: self.axes(*leaf) is not None, params)

    def is_other(self, params: Any) -> Any:
        """True for all other parameters."""
        return jax.tree.map(lambda is_matrix: not is_matrix, self.is_matrix(params))

    def mapped(self, function: Callable[..., Any], tree: Any, *others: Any) -> Any:
        """`function(axes, leaf, ...)` for each leaf of trees in which all leaves are matrices."""
        return tree_map_with_path(
            lambda path, leaf, *rest: function(self.axes(path, leaf), leaf, *rest), tree, *others
        )
