"""The passes of a function as separate functions: forward, backward, and backward in two parts.

What a forward pass saves for the backward pass, and what the gradient of the input saves for those
of the parameters, are arrays that a schedule may keep for as long as it likes. Knows jaxprs;
nothing of networks, and of schedules only that passes run at separate times.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from scalejax.models.packing import Documents, packed
from scalejax.training.gradient_sync.device_rows import PyTree


class Parameters(NamedTuple):
    """Parameters, some of which learn: two trees of the same structure, each with None in place of
    what is in the other."""

    learning: PyTree
    """Those with respect to which the loss is differentiated."""
    frozen: PyTree
    """The others."""
    documents: Documents | None = None
    """Not parameters: the documents of a microbatch, which blocks are given along with them."""

    @property
    def whole(self) -> PyTree:
        """All of them, in one tree."""
        return jax.tree.map(
            lambda learning, frozen: frozen if learning is None else learning,
            self.learning,
            self.frozen,
            is_leaf=lambda leaf: leaf is None,
        )


def _given(
    function: Callable[[PyTree, jax.Array], Any], params: Parameters, learning: PyTree, x: jax.Array
) -> Any:
    with packed(params.documents):
        return function(params._replace(learning=learning).whole, x)


@dataclass(frozen=True)
class Split:
    """The forward and the backward pass of a function as two functions, the first of which saves
    arrays for the second. Neither parameters nor what follows from them alone is saved."""

    traced: ClosedJaxpr
    """(parameters, x) to (result and what is reported, what the backward pass needs)."""
    made: Any
    """Shapes of the result (x, and an addition to the loss or None) and of what is reported."""
    back: Any
    """Structure of the backward function."""
    is_saved: tuple[bool, ...]
    """For each array that the backward pass needs, whether it depends on x."""

    @classmethod
    def of(
        cls, function: Callable[[PyTree, jax.Array], Any], params: Parameters, x: Any
    ) -> "Split":
        """The passes of `function` for arguments of these shapes."""
        structure = []

        def forward(params: Parameters, x: jax.Array) -> tuple[PyTree, list[jax.Array]]:
            result, back, report = jax.vjp(
                partial(_given, function, params),
                params.learning,
                x,
                has_aux=True,
            )
            leaves, back = jax.tree.flatten(back)
            structure.append(back)
            return (result, report), leaves

        traced, (made, needed) = jax.make_jaxpr(forward, return_shape=True)(params, x)
        jaxpr = traced.jaxpr
        moving = {jaxpr.invars[-1]}
        for each in jaxpr.eqns:
            if any(not isinstance(var, Literal) and var in moving for var in each.invars):
                moving.update(each.outvars)
        needed = jaxpr.outvars[len(jaxpr.outvars) - len(needed) :]
        is_saved = tuple(not isinstance(var, Literal) and var in moving for var in needed)
        return cls(traced, made, structure[0], is_saved)

    @property
    def report(self) -> Any:
        """Shapes of what is reported."""
        return self.made[1]

    @property
    def adds_loss(self) -> bool:
        """Whether the function adds to the loss."""
        return self.made[0][1] is not None

    @property
    def saved(self) -> list[Any]:
        """Shapes of what is saved."""
        return [
            jax.ShapeDtypeStruct(shape.shape, shape.dtype)
            for shape, is_saved in zip(
                self.traced.out_avals[-len(self.is_saved) :], self.is_saved, strict=True
            )
            if is_saved
        ]

    def _all(self, params: Parameters, x: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The leaves of what is made, and all that the backward pass needs."""
        made = jaxpr_as_fun(self.traced)(*jax.tree.leaves(params), x)
        count = len(made) - len(self.is_saved)
        return made[:count], made[count:]

    def forward(
        self, params: Parameters, x: jax.Array
    ) -> tuple[jax.Array, PyTree, list[jax.Array]]:
        """x of the result, what is reported, and what is saved."""
        made, needed = self._all(params, x)
        (x, _), report = jax.tree.unflatten(jax.tree.structure(self.made), made)
        return x, report, list(itertools.compress(needed, self.is_saved))

    def backward(
        self,
        params: Parameters,
        saved: list[jax.Array],
        gradients: tuple[jax.Array, jax.Array | None],
    ) -> tuple[PyTree, jax.Array]:
        """Gradients of the parameters that learn and of x, from those of the result."""
        x = self.traced.in_avals[-1]
        # Nothing of this that depends on x is used: the compiler removes it.
        _, needed = self._all(params, jnp.zeros(x.shape, x.dtype))
        own = iter(saved)
        needed = [
            next(own) if is_saved else leaf
            for leaf, is_saved in zip(needed, self.is_saved, strict=True)
        ]
        return jax.tree.unflatten(self.back, needed)(gradients)


@dataclass(frozen=True)
class BackwardParts:
    """The backward pass of a `Split` in two: the gradient of x, and those of the parameters (B and
    W of Qi et al. 2023, arXiv 2401.10241, section 2.1)."""

    structure: Any
    """Structure of the gradients of the parameters."""
    parts: "_Parts"
    """(parameters, saved, weight, gradient) to (gradients of the parameters, gradient of x), the
    last of which is computed first."""

    @classmethod
    def of(cls, split: Split, params: Parameters, x: Any) -> "BackwardParts":
        """The two parts for parameters and an x of these shapes."""
        structure = []
        weight = jax.ShapeDtypeStruct((), jnp.float32) if split.adds_loss else None

        def backward(
            params: Parameters, saved: list[jax.Array], weight: jax.Array | None, gradient: Any
        ) -> PyTree:
            of_params, of_x = split.backward(params, saved, (gradient, weight))
            leaves, tree = jax.tree.flatten(of_params)
            structure.append(tree)
            return leaves, of_x

        nested = jax.make_jaxpr(backward)(params, split.saved, weight, x)
        arguments = len(nested.in_avals)
        parameters = len(jax.tree.leaves(params))
        sources = [_PARAMETERS] * parameters + [_SAVED] * (arguments - parameters - 1)
        sources.append(_GRADIENT)
        is_first = (*(False for _ in nested.out_avals[:-1]), True)
        parts = _Parts.of(
            _flat(nested, is_first, sources),
            is_first,
            sources,
            is_given=[source != _GRADIENT for source in sources],
        )
        return cls(structure[0], parts)

    @property
    def saved(self) -> list[Any]:
        """Shapes of what the first part saves for the second."""
        shapes: list[Any] = [var.aval for var in self.parts.between]
        return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in shapes]

    def of_input(
        self,
        params: Parameters,
        saved: list[jax.Array],
        gradients: tuple[jax.Array, jax.Array | None],
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The gradient of x, from those of the result, and what is saved."""
        gradient, weight = gradients
        values = [*jax.tree.leaves((params, saved, weight)), gradient]
        (of_x,), between = self.parts.made_first(values)
        return of_x, between

    def of_weights(
        self,
        params: Parameters,
        saved: list[jax.Array],
        between: list[jax.Array],
        weight: jax.Array | None,
    ) -> PyTree:
        """Gradients of the parameters that learn."""
        values = [*jax.tree.leaves((params, saved, weight)), None]
        return jax.tree.unflatten(self.structure, self.parts.made_then(values, between))


_PARAMETERS, _SAVED, _GRADIENT = range(3)
"""What a value of a backward pass is computed from: parameters alone; also what was saved, but not
the gradient; the gradient. The source of an equation is the largest of its operands' sources."""


@dataclass(frozen=True)
class _Parts:
    """A function without calls as two functions, the first of which saves arrays for the second."""

    traced: ClosedJaxpr
    """The function."""
    is_first: tuple[bool, ...]
    """For each of its results, whether the first part makes it; the second makes the others."""
    first: tuple[JaxprEqn, ...]
    """What the first part computes."""
    then: tuple[JaxprEqn, ...]
    """What the second part computes; products that do not depend on the gradient are not computed
    again."""
    between: tuple[Var, ...]
    """What the first part saves for the second."""

    @classmethod
    def of(
        cls,
        traced: ClosedJaxpr,
        is_first: Sequence[bool],
        sources: Sequence[int],
        is_given: Sequence[bool],
    ) -> "_Parts":
        """The two parts.

        Args:
            traced: a function without calls.
            is_first: for each of its results, as in the field.
            sources: those of its arguments.
            is_given: for each argument, whether the second part is given it too; else it is saved.
        """
        jaxpr = traced.jaxpr
        source = _sources(jaxpr, sources)
        made_by = {var: each for each in jaxpr.eqns for var in each.outvars}
        by_id = {id(each): each for each in jaxpr.eqns}
        arguments = frozenset(jaxpr.invars)
        wanted = list(itertools.compress(jaxpr.outvars, is_first))
        later = [var for var, early in zip(jaxpr.outvars, is_first, strict=True) if not early]
        first = _needed(wanted, made_by, arguments)
        for result in later:
            more = _needed([result], made_by, arguments) - first
            # Gradients without a product, of norms and biases: they are small, unlike what they
            # sum.
            if all(_is_cheap(by_id[each], source) for each in more):
                first |= more
        own = {*itertools.compress(jaxpr.invars, is_given), *jaxpr.constvars}
        # Cheap to compute again from what was saved: it need not be kept from the first part.
        again = set(own)
        for each in jaxpr.eqns:
            is_known = _source(each, source) < _GRADIENT and again.issuperset(
                _variables(each.invars)
            )
            if is_known and _is_cheap(each, source):
                again.update(each.outvars)
        known = {var for each in jaxpr.eqns if id(each) in first for var in each.outvars}
        ends = frozenset((known - again) | arguments | own)
        then = _needed(later, made_by, ends)
        read = set(_variables(later))
        read.update(var for each in then for var in _variables(by_id[each].invars))
        kept = (*jaxpr.invars, *(var for each in jaxpr.eqns for var in each.outvars))
        return cls(
            traced,
            tuple(is_first),
            tuple(each for each in jaxpr.eqns if id(each) in first),
            tuple(each for each in jaxpr.eqns if id(each) in then),
            tuple(var for var in kept if var in read and var in ends and var not in own),
        )

    @property
    def is_read_then(self) -> list[bool]:
        """For each argument, whether the second part reads it."""
        read = {var for each in self.then for var in _variables(each.invars)}
        read.update(_variables(self.traced.jaxpr.outvars))
        return [var in read and var not in self.between for var in self.traced.jaxpr.invars]

    def made_first(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results of the first part, from all arguments, and what is saved."""
        known = self._known(values)
        _evaluate(self.first, known)
        wanted = itertools.compress(self.traced.jaxpr.outvars, self.is_first)
        return [_read(known, var) for var in wanted], [known[var] for var in self.between]

    def made_then(self, values: Sequence[Any], between: Sequence[Any]) -> list[Any]:
        """The results of the second part, from the arguments (None for those that it does not read)
        and what was saved."""
        known = self._known(values) | dict(zip(self.between, between, strict=True))
        _evaluate(self.then, known)
        results = zip(self.traced.jaxpr.outvars, self.is_first, strict=True)
        return [_read(known, var) for var, is_first in results if not is_first]

    def _known(self, values: Sequence[Any]) -> dict[Var, Any]:
        jaxpr = self.traced.jaxpr
        return dict(zip(jaxpr.constvars, self.traced.consts, strict=True)) | dict(
            zip(jaxpr.invars, values, strict=True)
        )


def _flat(closed: ClosedJaxpr, is_first: Sequence[bool], sources: Sequence[int]) -> ClosedJaxpr:
    """`closed` without calls, in which no loop or `shard_map` makes results for both parts."""
    inlined = jax.make_jaxpr(partial(_inlined, closed))(*closed.in_avals)
    return jax.make_jaxpr(partial(_divided, inlined, is_first, sources))(*inlined.in_avals)


def _divided(
    closed: ClosedJaxpr, is_first: Sequence[bool], sources: Sequence[int], *values: Any
) -> list[Any]:
    """The results of `closed`, with each loop and `shard_map` replaced by one for each part that it
    makes results for."""
    jaxpr = closed.jaxpr
    source = _sources(jaxpr, sources)
    made_by = {var: each for each in jaxpr.eqns for var in each.outvars}
    wanted = list(itertools.compress(jaxpr.outvars, is_first))
    first = _needed(wanted, made_by, frozenset(jaxpr.invars))
    early = {var for each in jaxpr.eqns if id(each) in first for var in _variables(each.invars)}
    early.update(_variables(wanted))
    used = {var for each in jaxpr.eqns for var in _variables(each.invars)}
    used.update(_variables(jaxpr.outvars))
    known: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, values, strict=True))
    for each in jaxpr.eqns:
        places = [place for place, var in enumerate(each.outvars) if var in used]
        parts = [
            [place for place in places if (each.outvars[place] in early) == is_early]
            for is_early in (True, False)
        ]
        given = [_read(known, atom) for atom in each.invars]
        if each.primitive.name == "while" and all(parts):
            with _context(each):
                made = _loops(each, parts, given)
        elif each.primitive.name == "shard_map":
            of_each = [_source_of(atom, source) for atom in each.invars]
            with _context(each):
                made = _shard_maps(each, parts, of_each, given)
        else:
            _evaluate([each], known)
            continue
        known.update((each.outvars[place], value) for place, value in made.items())
    return [_read(known, atom) for atom in jaxpr.outvars]


def _loops(
    equation: JaxprEqn, parts: Iterable[list[int]], given: Sequence[Any]
) -> dict[int, jax.Array]:
    """The results of a loop at the places of `parts`, from a loop for each of them that carries no
    more than it has to."""
    test, body = (_closed(equation.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    tested, computed = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    of_test, of_body = given[:tested], given[tested : tested + computed]
    start, entering = given[tested + computed :], body.jaxpr.invars[computed:]
    made_by = {var: each for each in body.jaxpr.eqns for var in each.outvars}
    is_tested = {var for each in test.jaxpr.eqns for var in _variables(each.invars)}
    is_tested.update(_variables(test.jaxpr.outvars))
    known_of_test = dict(zip(test.jaxpr.constvars, test.consts, strict=True))
    known_of_test |= dict(zip(test.jaxpr.invars[:tested], of_test, strict=True))
    known_of_body = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
    known_of_body |= dict(zip(body.jaxpr.invars[:computed], of_body, strict=True))

    def loop(places: Iterable[int]) -> dict[int, jax.Array]:
        carried = {*places}
        carried |= {at for at, var in enumerate(test.jaxpr.invars[tested:]) if var in is_tested}
        while True:
            leaving = [body.jaxpr.outvars[place] for place in carried]
            needed = _needed(leaving, made_by, frozenset(body.jaxpr.invars))
            steps = [each for each in body.jaxpr.eqns if id(each) in needed]
            read = {var for each in steps for var in _variables(each.invars)}
            read.update(_variables(leaving))
            more = {place for place, var in enumerate(entering) if var in read} - carried
            if not more:
                break
            carried |= more
        order = sorted(carried)

        def goes_on(carry: list[jax.Array]) -> jax.Array:
            known = dict(known_of_test)
            known.update(zip((test.jaxpr.invars[tested + at] for at in order), carry, strict=True))
            _evaluate(test.jaxpr.eqns, known)
            return _read(known, test.jaxpr.outvars[0])

        def round(carry: list[jax.Array]) -> list[jax.Array]:
            known = dict(known_of_body)
            known.update(zip((entering[at] for at in order), carry, strict=True))
            _evaluate(steps, known)
            return [_read(known, body.jaxpr.outvars[at]) for at in order]

        made = lax.while_loop(goes_on, round, [start[at] for at in order])
        return dict(zip(order, made, strict=True))

    return {
        place: value for places in parts for place, value in loop(places).items() if place in places
    }


def _shard_maps(
    equation: JaxprEqn,
    parts: Sequence[list[int]],
    sources: Sequence[int],
    given: Sequence[Any],
) -> dict[int, Any]:
    """The results of a `shard_map` at the places of both `parts`, from one `shard_map` for each;
    and from one more, those that follow from parameters alone, which both parts may compute."""
    inner = _closed(equation.params["jaxpr"])
    in_specs, out_specs = equation.params["in_specs"], equation.params["out_specs"]
    axes: frozenset[str] = equation.params["newly_manual_axes"]
    mapped = partial(jax.shard_map, axis_names=axes, check_vma=equation.params["check_vma"])
    source = _sources(inner.jaxpr, sources)
    of_results = [_source_of(var, source) for var in inner.jaxpr.outvars]
    alone = [at for part in parts for at in part if of_results[at] == _PARAMETERS]
    early, later = ([at for at in part if at not in alone] for part in parts)

    def specs_of(places: Iterable[int]) -> tuple[P, ...]:
        return tuple(out_specs[at] for at in places)

    def by_itself(places: list[int]) -> dict[int, Any]:
        """The results at `places`, with no other arguments than they need."""
        made_by = {var: each for each in inner.jaxpr.eqns for var in each.outvars}
        results = [inner.jaxpr.outvars[at] for at in places]
        needed = _needed(results, made_by, frozenset(inner.jaxpr.invars))
        steps = [each for each in inner.jaxpr.eqns if id(each) in needed]
        read = {var for each in steps for var in _variables(each.invars)}
        read.update(_variables(results))
        is_read = [var in read for var in inner.jaxpr.invars]

        def of_device(*values: Any) -> list[Any]:
            known = dict(zip(itertools.compress(inner.jaxpr.invars, is_read), values, strict=True))
            _evaluate(steps, known)
            return [_read(known, var) for var in results]

        own = tuple(itertools.compress(in_specs, is_read))
        made = mapped(of_device, in_specs=own, out_specs=list(specs_of(places)))
        return dict(zip(places, made(*itertools.compress(given, is_read)), strict=True))

    found = by_itself(alone) if alone else {}
    if not (early and later):
        return found | (by_itself([*early, *later]) if early or later else {})
    is_first = [True] * len(early) + [False] * len(later)
    held: list[_Parts] = []

    def first(*values: Any) -> tuple[list[Any], list[Any]]:
        def wanted(*values: Any) -> list[Any]:
            made = jaxpr_as_fun(inner)(*values)
            return [made[at] for at in (*early, *later)]

        flat = _flat(jax.make_jaxpr(wanted)(*values), is_first, sources)
        held.append(_Parts.of(flat, is_first, sources, is_given=[True] * len(values)))
        made, between = held[-1].made_first(values)
        return made, [each[None] for each in between]

    # Each device saves its own arrays, which are stacked along a new dimension.
    of_devices = P(tuple(sorted(axes)))
    of_first = (list(specs_of(early)), of_devices)
    made, between = mapped(first, in_specs=in_specs, out_specs=of_first)(*given)
    is_read = held[-1].is_read_then

    def then(between: list[Any], *values: Any) -> list[Any]:
        own = iter(values)
        whole = [next(own) if each else None for each in is_read]
        return held[-1].made_then(whole, [each[0] for each in between])

    own = tuple(itertools.compress(in_specs, is_read))
    others = mapped(then, in_specs=(of_devices, *own), out_specs=list(specs_of(later)))(
        between, *itertools.compress(given, is_read)
    )
    return found | dict(zip((*early, *later), (*made, *others), strict=True))


_PRODUCTS = {
    "dot_general",
    "conv_general_dilated",
    "scan",
    "while",
    "ragged_dot",
    "sort",
    "top_k",
}
"""Primitives that are too expensive to compute twice; so are calls of kernels."""
_COLLECTIVES = {"all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter"}
"""Primitives that are too expensive except on parameters, which would otherwise be kept whole."""


def _is_cheap(equation: JaxprEqn, source: Mapping[Var, int]) -> bool:
    name = equation.primitive.name
    if name in _PRODUCTS or "dot_product_attention" in name or "ffi" in name:
        return False
    if name == "shard_map":
        return _source(equation, source) == _PARAMETERS and all(
            _is_cheap(each, {}) for each in equation.params["jaxpr"].eqns
        )
    return name not in _COLLECTIVES or _source(equation, source) == _PARAMETERS


def _sources(jaxpr: Jaxpr, of_arguments: Sequence[int]) -> dict[Var, int]:
    """What each value is computed from."""
    found: dict[Var, int] = dict(zip(jaxpr.invars, of_arguments, strict=True))
    for each in jaxpr.eqns:
        found.update(dict.fromkeys(each.outvars, _source(each, found)))
    return found


def _source(equation: JaxprEqn, source: Mapping[Var, int]) -> int:
    return max((_source_of(atom, source) for atom in equation.invars), default=_PARAMETERS)


def _source_of(atom: Any, source: Mapping[Var, int]) -> int:
    return _PARAMETERS if isinstance(atom, Literal) else source.get(atom, _PARAMETERS)


@contextmanager
def _context(equation: JaxprEqn) -> Iterator[None]:
    """The context in which an equation was traced, with its name scopes, which identify a loop."""
    scopes = f"{equation.source_info.name_stack}"
    with equation.ctx.manager, jax.named_scope(scopes) if scopes else nullcontext():
        yield


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _needed(
    wanted: Iterable[Any], made_by: Mapping[Var, JaxprEqn], ends: frozenset[Var]
) -> set[int]:
    """Identities of the equations that make `wanted` from `ends`."""
    found: set[int] = set()
    waiting = _variables(wanted)
    while waiting:
        var = waiting.pop()
        if var in ends or var not in made_by or id(made_by[var]) in found:
            continue
        found.add(id(made_by[var]))
        waiting.extend(_variables(made_by[var].invars))
    return found


def _read(known: Mapping[Var, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]


def _evaluate(equations: Iterable[JaxprEqn], known: dict[Var, Any]) -> None:
    """Compute `equations` in order, from and into the values of variables."""
    for each in equations:
        # Functions among the parameters are operands in older JAX, and parameters in newer.
        bound = each.primitive.get_bind_params(each.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        values = [_read(known, atom) for atom in each.invars]
        with _context(each):
            made = each.primitive.bind(*functions, *values, **params)
        results = made if each.primitive.multiple_results else [made]
        known.update(zip(each.outvars, results, strict=True))


def _inlined(closed: ClosedJaxpr, *values: Any) -> list[Any]:
    """The results of `closed`, with its calls and its loops of one iteration computed in place."""
    jaxpr = closed.jaxpr
    known: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, values, strict=True))
    for each in jaxpr.eqns:
        name = each.primitive.name
        given = [_read(known, atom) for atom in each.invars]
        if name in ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"):
            made = _inlined(_closed(each.params["jaxpr"]), *given)
        elif name == "scan" and each.params["length"] == 1:
            inner = _closed(each.params["jaxpr"])
            # What is scanned over, and what is stacked, has one dimension more than in the
            # iteration.
            entering = zip(given, inner.in_avals, strict=True)
            made = _inlined(
                inner, *(x[0] if jnp.ndim(x) > _rank(aval) else x for x, aval in entering)
            )
            leaving = zip(made, each.outvars, strict=True)
            made = [x[None] if _rank(var.aval) > jnp.ndim(x) else x for x, var in leaving]
        else:
            _evaluate([each], known)
            continue
        known.update(zip(each.outvars, made, strict=True))
    return [_read(known, atom) for atom in jaxpr.outvars]


def _closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr in the parameters of a loop or call; its type depends on the version of JAX."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _rank(aval: Any) -> int:
    return len(aval.shape)
