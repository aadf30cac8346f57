"""Attention of JAX arrays: calls of the compiled module through XLA's foreign function interface.

One differentiable function over them (`jax.custom_vjp`), so that jit, grad, vmap, checkpoint, scan
and shard_map see an operation of their own. Imported when the first JAX array arrives. What does
not change the shape of the program (seeds, offsets) travels as an operand: it may be traced, and a
new value is no new program. The handlers are in cpp/bindings/jax_ffi.cpp.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from flashattn import _core
from flashattn._arrays import DispatchingFramework
from flashattn._framework import output_shapes, packed_shapes
from flashattn._jax_merge import merge
from flashattn._options import DropoutShard, parse_own
from flashattn._varlen import parse_packed

if TYPE_CHECKING:
    from collections.abc import Mapping

    Arrays = tuple[Any, ...]
    # Attributes of the FFI call, hashable: (name, int, float or str) each.
    Static = tuple[tuple[str, Any], ...]

_FORWARD_TARGET = "flashattn_forward"
_BACKWARD_TARGET = "flashattn_backward"
jax.ffi.register_ffi_target(_FORWARD_TARGET, _core.jax_forward(), platform="cpu")
jax.ffi.register_ffi_target(_BACKWARD_TARGET, _core.jax_backward(), platform="cpu")

# Operands by name, those that have a gradient first.
_DIFFERENTIABLE = ("query", "key", "value", "mask", "alibi_slopes", "sinks")
_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "block_table")
_PER_CALL = ("q_offset", "kv_lengths", *_PACKED, "numbers")
_OPERANDS = _DIFFERENTIABLE + _PER_CALL
_GRADIENTS = ("dq", "dk", "dv", "dmask", "dalibi_slopes", "dsinks")
# Rows of the operand "numbers", in front of the six of a DropoutShard.
_NUMBERS = ("dropout_seed", "dropout_offset", "q_offset", "k_offset")
_CAUSAL = {_core.Causal.NONE: 0, _core.Causal.BOTTOM_RIGHT: 1, _core.Causal.TOP_LEFT: 2}


def _call(target: str, results: Any, named: Mapping[str, Any], names: str, static: Static) -> Any:
    """One FFI call. vmap puts axes in front of every operand, of size 1 where it is shared."""
    given = {name: array for name, array in named.items() if array is not None}
    attributes = {
        name: {int: np.int64, float: np.float64, str: str}[type(value)](value)
        for name, value in static
    }
    call = jax.ffi.ffi_call(target, results, vmap_method="expand_dims")
    return call(*given.values(), operands=" ".join(given), results=names, **attributes)


def _alike(arrays: Arrays) -> Arrays:
    """The arrays, all varying over the same axes of shard_map's mesh, as one primitive wants them.

    Like every cast to varying, this sums the gradient of a replicated array over the mesh.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return arrays
    varies = [frozenset() if x is None else jax.typeof(x).manual_axis_type.varying for x in arrays]
    axes: frozenset[str] = frozenset().union(*varies)
    return tuple(
        x if x is None or own == axes else jax.lax.pcast(x, tuple(axes - own), to="varying")
        for x, own in zip(arrays, varies, strict=True)
    )


def _shape(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A result that varies over the axes over which `like` does."""
    kind = jax.typeof(like)
    if not kind.manual_axis_type.varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
    varying = {"manual_axis_type": kind.manual_axis_type}
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, **varying)


def _with_four_axes(named: dict[str, Any]) -> dict[str, Any]:
    mask = named["mask"]
    if mask is not None and mask.ndim < 4:
        named["mask"] = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return named


def _forward(static: Static, operands: Arrays) -> tuple[Any, Any]:
    """(out, lse) of operands in the order of _OPERANDS, None where there is none."""
    named = _with_four_axes(dict(zip(_OPERANDS, operands, strict=True)))
    query, value = named["query"], named["value"]
    if named["cu_seqlens_q"] is not None:
        out, lse = packed_shapes(query.shape, value.shape)
    else:
        out, lse = output_shapes(query.shape, value.shape, dict(static)["heads_first"] == 1)
    results = (_shape(query, out, query.dtype), _shape(query, lse, np.float32))
    out, lse = _call(_FORWARD_TARGET, results, named, "out lse", static)
    return out, lse


def _backward(static: Static, operands: Arrays, results: Arrays, wanted: Arrays) -> list[Any]:
    """Gradients of the first six operands, None where not wanted; results: out, lse, dout, dlse."""
    named = dict(zip(_OPERANDS, operands, strict=True))
    inputs = [named[name] for name in _DIFFERENTIABLE]
    named = _with_four_axes(named) | dict(zip(("out", "lse", "dout", "dlse"), results, strict=True))
    names, shapes = [], []
    for index, (name, want) in enumerate(zip(_GRADIENTS, wanted, strict=True)):
        array = named[_DIFFERENTIABLE[index]]
        if want and array is not None:
            wide = np.float64 if array.dtype == np.float64 else np.float32
            names.append(name)
            shapes.append(_shape(array, array.shape, array.dtype if index < 3 else wide))
    if not names:
        return [None] * len(_GRADIENTS)
    found = _call(_BACKWARD_TARGET, tuple(shapes), named, " ".join(names), static)
    by_name = dict(zip(names, found, strict=True))
    return [
        by_name[name].reshape(array.shape) if name in by_name else None
        for name, array in zip(_GRADIENTS, inputs, strict=True)
    ]


def _refusing(function: Any, text: str) -> Any:
    """`function` of arrays, whose differentiation raises `text` instead of jax's own words."""
    wrapped = jax.custom_jvp(function, nondiff_argnums=(0,))

    def refuse(*arguments: Any) -> NoReturn:
        raise RuntimeError(text)

    wrapped.defjvp(refuse)
    return wrapped


_SECOND = "attention: a second derivative is not supported"
_raw_forward = _refusing(
    _forward, "attention_forward is not differentiable: flashattn.attention is"
)
_forward_once = _refusing(_forward, _SECOND)
_backward_once = _refusing(
    lambda static_and_wanted, operands, results: _backward(
        static_and_wanted[0], operands, results, static_and_wanted[1]
    ),
    _SECOND,
)


def _primal(static: Static, inputs: Arrays, others: Arrays) -> tuple[Any, Any]:
    return _forward(static, (*inputs, *others))


def _recorded(static: Static, inputs: Arrays, others: Arrays) -> Any:
    # Which gradients are wanted is known while tracing: it is kept as structure, without leaves.
    wanted = tuple(None if x is None or not x.perturbed else () for x in inputs)
    operands = tuple(None if x is None else x.value for x in (*inputs, *others))
    out, lse = _forward_once(static, operands)
    return (out, lse), (operands, out, lse, wanted)


def _cotangents(static: Static, kept: Any, arriving: Any) -> tuple[Arrays, Arrays]:
    operands, out, lse, wanted = kept
    dout, dlse = arriving
    if isinstance(dout, SymbolicZero):
        _, dout = _alike((out, jnp.zeros(out.shape, out.dtype)))
    if isinstance(dlse, SymbolicZero):
        dlse = None
    flags = tuple(want is not None for want in wanted)
    found = _backward_once((static, flags), operands, (out, lse, dout, dlse))
    # JAX wants a gradient in the dtype of its input, also of a half-precision mask.
    cast = [
        None if dx is None else dx.astype(x.dtype) for dx, x in zip(found, operands, strict=False)
    ]
    return tuple(cast), (None,) * len(_PER_CALL)


_attention = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_attention.defvjp(_recorded, _cotangents, symbolic_zeros=True)

# Outside of a jit every primitive is a dispatch of its own.
_attention_call = jax.jit(_attention, static_argnums=0, inline=True)
_forward_call = jax.jit(_raw_forward, static_argnums=0, inline=True)
_backward_call = jax.jit(_backward_once, static_argnums=0, inline=True)


def _words(name: str, value: Any) -> Any:
    """The low and the high uint32 word of an integer, a JAX scalar, or a key for the seed."""
    if not isinstance(value, jax.Array):
        number = int(value)
        return np.array([number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF], np.uint32)
    if name == "dropout_seed":
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) and value.shape == ():
            return jax.random.bits(value, (2,), np.uint32)
        if value.dtype == np.uint32 and value.shape == (2,):
            return value
    if value.shape != () or not jnp.issubdtype(value.dtype, np.integer):
        kinds = " or a key" if name == "dropout_seed" else ""
        raise TypeError(f"attention: {name} ({value.dtype}{value.shape}) must be an int{kinds}")
    if value.dtype.itemsize == 8:
        return jnp.stack([value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF]).astype(np.uint32)
    high = jnp.where(value < 0, np.uint32(0xFFFFFFFF), np.uint32(0))
    return jnp.stack([value.astype(np.uint32), high])


def _numbers(function: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The operand "numbers", or None where no option asks for it; and what is not traced of it."""
    taken = {name: options.pop(name) for name in _NUMBERS if name in options}
    offset = taken.get("q_offset")
    if offset is not None and np.ndim(offset) != 0:  # one per batch entry: an array of its own
        options["q_offset"] = taken.pop("q_offset")
    taken = {name: value for name, value in taken.items() if value is not None}
    shard = options.pop("dropout_shard", None)
    if shard is not None and not isinstance(shard, DropoutShard):
        taken["dropout_shard"] = shard  # for the error
    fields = tuple(shard) if isinstance(shard, DropoutShard) else (0,) * 6
    known = {name: x for name, x in taken.items() if not isinstance(x, jax.Array)}
    if shard is not None and not any(isinstance(x, jax.Array) for x in fields):
        known["dropout_shard"] = shard
    parse_own(function, known)
    if not taken and shard is None:
        return None, known
    words = [_words(name, taken.get(name, 0)) for name in _NUMBERS]
    words += [_words("dropout_shard", field) for field in fields]
    traced = any(isinstance(word, jax.Array) for word in words)
    return (jnp.stack(words) if traced else np.stack(words)), known


def _integers(function: str, name: str, value: Any) -> Any:
    """An option of one integer per batch entry, as JAX has integers."""
    if value is None or isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    if array.dtype == np.int64 and not jax.config.jax_enable_x64:
        if array.size and np.abs(array).max() >= 2**31:
            raise ValueError(f"{function}: {name} must fit into int32 unless jax_enable_x64 is set")
        array = array.astype(np.int32)
    return array


def _as_array(function: str, name: str, value: Any) -> Any:
    if value is None or isinstance(value, jax.Array):
        return value
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{function}: {name} ({type(value).__name__}) must be an array")
    return jnp.asarray(value)


@functools.lru_cache(maxsize=1024)
def _check(function: str, shapes: Any, settings: Any) -> None:
    """Raises what the call would raise, from shapes and dtypes; the result is kept."""
    options = dict(settings)
    arrays: dict[str, Any] = {
        name: np.broadcast_to(np.zeros((), dtype), shape) for name, shape, dtype in shapes
    }
    rows, keys, table = (arrays.pop(name, None) for name in _PACKED)
    query, key, value = (arrays.pop(name) for name in ("query", "key", "value"))
    options |= arrays
    if rows is None:
        parsed = parse_own(function, options)
    else:
        parsed = parse_packed(function, rows, keys, table, options)
    _core.check_call(query, key, value, parsed)


def _prepare(
    function: str, tensors: Arrays, given: Mapping[str, Any]
) -> tuple[Static, Arrays, Arrays]:
    """(static, differentiable operands, others) of a call, after all checks that need no values."""
    options = {name: value for name, value in given.items() if value is not None}
    numbers, known = _numbers(function, options)
    named: dict[str, Any] = dict(zip(("query", "key", "value"), tensors, strict=True))
    for name in _DIFFERENTIABLE[3:]:
        named[name] = _as_array(function, name, options.pop(name, None))
    for name in _PER_CALL[:-1]:
        named[name] = _integers(function, name, options.pop(name, None))
    if options.get("dropout_p") and "dropout_seed" not in given:
        raise ValueError(
            f"{function}: dropout_seed (not given) must be an int or a jax.random key when "
            "dropout_p > 0: JAX has no generator of its own"
        )
    shapes = tuple((n, x.shape, np.dtype(x.dtype)) for n, x in named.items() if x is not None)
    # Numbers that change from call to call have been looked at one by one; a shard has sizes.
    if "dropout_shard" in known:
        options["dropout_shard"] = known["dropout_shard"]
    scalar_offset = given.get("q_offset") is not None and named["q_offset"] is None
    if scalar_offset:
        options["q_offset"] = 0
    parsed = parse_own(function, options)
    if "window" in options:
        options["window"] = tuple(parsed.window)
    _check(function, shapes, tuple(options.items()))
    static: dict[str, Any] = {
        "causal": _CAUSAL[parsed.causal],
        "window_left": parsed.window[0],
        "window_right": parsed.window[1],
        "softcap": parsed.softcap,
        "dropout_p": parsed.dropout_p,
        "heads_first": int(parsed.heads_first),
        "backend": parsed.backend,
        "has_q_offset": int(scalar_offset),
        "has_dropout_shard": int(given.get("dropout_shard") is not None),
    }
    if parsed.scale is not None:
        static["scale"] = parsed.scale
    named["numbers"] = numbers
    operands = _alike(tuple(named[name] for name in _OPERANDS))
    count = len(_DIFFERENTIABLE)
    return tuple(static.items()), operands[:count], operands[count:]


class JaxFramework(DispatchingFramework):
    """JAX arrays, traced ones included; calls that append to a cache go by DLPack."""

    arrays = "JAX arrays"

    def dispatch(
        self, function: str, query: Any, key: Any, value: Any, out: Any, options: Any
    ) -> tuple[Any, Any]:
        self.refuse_out(function, out)
        result: tuple[Any, Any] = _attention_call(*_prepare(function, (query, key, value), options))
        return result

    def dispatch_raw(self, function: str, tensors: Any, out: Any, options: Any) -> tuple[Any, Any]:
        self.refuse_out(function, out)
        static, inputs, others = _prepare(function, tensors, options)
        result: tuple[Any, Any] = _forward_call(static, (*inputs, *others))
        return result

    def dispatch_backward(
        self, function: str, results: Any, tensors: Any, options: Any
    ) -> tuple[Any, ...]:
        static, inputs, others = _prepare(function, tensors, options)
        dout, dlse, out, lse = results
        wanted = tuple(x is not None and x.dtype != np.bool_ for x in inputs)
        found = _backward_call((static, wanted), (*inputs, *others), (out, lse, dout, dlse))
        return tuple(found)

    def merge(self, outs: list[Any], lses: list[Any], heads_first: bool) -> tuple[Any, Any]:
        return merge(outs, lses, heads_first)


FRAMEWORK = JaxFramework()
