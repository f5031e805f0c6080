"""FLOP of a function, counted in its jaxpr before compilation.

Counts only matrix products and convolutions: loops by their trip count, loops over blocks of tokens
of an expert as often as at even loads (with padding of fewer than 32 rows, 3 % of 1000 tokens of an
expert), any other `while` of unknown length once, and the costliest branch of a conditional.
Ignores element-wise arithmetic and table look-ups (under 1 % of a transformer of width >= 512).
Counts causal attention unmasked, as it is computed; over a sliding window, each token with as many
as the window has, however it is computed. Counts products with the padding of a convolution.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from scalejax.config.model import seen_share
from scalejax.config.moe import blocks_at_even_load


def forward_flop(function: Callable[..., Any], *arguments: Any) -> int:
    """FLOP of `function(*arguments)`; arrays may be given as shapes."""
    return _flop(jax.make_jaxpr(function)(*arguments).jaxpr)


def _flop(jaxpr: Any, in_window: bool = False) -> int:
    return sum(_equation_flop(equation, in_window) for equation in jaxpr.eqns)


def _equation_flop(equation: Any, in_window: bool) -> int:
    """FLOP of an equation; `in_window` if an equation around it has been counted by its window."""
    if not in_window:
        seen, computed = seen_share(f"{equation.source_info.name_stack}")
        if computed > 1:
            return _equation_flop(equation, in_window=True) * seen // computed
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _product_flop(equation)
    if name == "conv_general_dilated":
        return _convolution_flop(equation)
    if name == "cond":
        return max(_flop(inner, in_window) for inner in _inner(params))
    inner = sum(_flop(inner, in_window) for inner in _inner(params))
    if name == "scan":
        return inner * params["length"]
    if name == "while" and (even := blocks_at_even_load(f"{equation.source_info.name_stack}")):
        return inner * even.blocks
    if name == "shard_map":  # traced per device
        return inner * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return inner


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs that an equation calls: of jit, remat, custom gradients, loops.

    The rules of a custom gradient are functions, not traces, until they are used: they do not
    count here.
    """
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def _product_flop(equation: Any) -> int:
    """FLOP of a matrix product: 2 x elements of the result x contracted length."""
    (contracting, _), _ = equation.params["dimension_numbers"]
    lhs = equation.invars[0].aval.shape
    summed = math.prod(lhs[axis] for axis in contracting)
    return 2 * math.prod(equation.outvars[0].aval.shape) * summed


def _convolution_flop(equation: Any) -> int:
    """FLOP of a convolution: 2 x elements of the result x window positions x channels of a group.

    If the input is dilated, so mostly zeros, only every (product of dilations)-th product counts.
    """
    numbers = equation.params["dimension_numbers"]
    kernel = equation.invars[1].aval.shape
    _, inputs, *spatial = (kernel[axis] for axis in numbers.rhs_spec)
    holes = math.prod(equation.params["lhs_dilation"])
    outputs = math.prod(equation.outvars[0].aval.shape)
    return 2 * outputs * inputs * math.prod(spatial) // holes
