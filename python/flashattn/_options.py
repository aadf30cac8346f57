"""The options that every attention call takes: names, kinds and meaning, each spelled once.

This module checks what a value *is* (an int, a pair, a known word); what it may be for the given
arrays is checked with the shapes, in the core.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypedDict,
    TypeVar,
)

import numpy as np

from flashattn._core import Causal, Options

if TYPE_CHECKING:
    from collections.abc import Sequence


class DropoutShard(NamedTuple):
    """Where the scores of a part lie in the global numbering of dropout.

    With it every part draws the bits that the whole would: element (b, h, i, j) of the part is
    element (b, head_start + h, query_start + i, key_start + j) of a problem of the global sizes.
    """

    global_heads: int
    head_start: int
    global_queries: int
    query_start: int
    global_keys: int
    key_start: int


class AttentionOptions(TypedDict, total=False):
    """Keyword options of every attention call. All of them combine; none is ever silently dropped.

    Attributes:
        scale: factor on query . key; default head_dim ** -0.5. Zero and negative are allowed.
        causal: False; True aligns the last query with the last key (key j is seen by row i when
            j <= i + seqlen_k - seqlen_q); "top_left" lets row i see keys 0..i.
        window: (left, right), inclusive distances in positions that a row sees; -1 is unlimited.
        mask: bool (True attends) or floating (added to the scores; -inf excludes), broadcastable to
            (batch, query_heads, seqlen_q, seqlen_k) whatever the layout.
        softcap: c > 0 turns each score s into c * tanh(s / c); 0 is off.
        alibi_slopes: float32 (query_heads,) or (batch, query_heads); score -= slope * distance
            (Press, Smith, Lewis: "Train Short, Test Long", ICLR 2022).
        sinks: float32 (query_heads,); one extra logit per head in the softmax's denominator.
        dropout_p: probability of dropping an attention weight, 0..1.
        dropout_seed: 64-bit seed of Philox4x32-10, or with JAX and MLX a key of their random;
            required when dropout_p > 0, except in `attention`, which draws one from the framework's
            generator. JAX has none.
        dropout_offset: start of the counter, for several calls with one seed.
        dropout_shard: the part of a larger problem that this call is.
        q_offset: global position of query row 0, one int or one per batch entry; row i stands at
            i + q_offset in causal, window and ALiBi.
        k_offset: global position of key 0.
        kv_lengths: int32 or int64 (batch,): keys from the length on do not exist for that entry.
        layout: "bshd" (batch, seqlen, heads, dim) or "bhsd" (batch, heads, seqlen, dim), for
            every array of the call that has these axes.
        backend: the name of a backend (see `backends`); default: the first that can do the call.
    """

    scale: float | None
    causal: bool | Literal["top_left"]
    window: tuple[int, int]
    mask: Any
    softcap: float
    alibi_slopes: Any
    sinks: Any
    dropout_p: float
    dropout_seed: int
    dropout_offset: int
    dropout_shard: DropoutShard | None
    q_offset: int | Sequence[int] | Any | None
    k_offset: int
    kv_lengths: Sequence[int] | Any | None
    layout: Literal["bshd", "bhsd"]
    backend: str | None


# Shown in signatures; the core's `Options` has the same.
DEFAULTS: AttentionOptions = {
    "scale": None,
    "causal": False,
    "window": (-1, -1),
    "mask": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "dropout_p": 0.0,
    "dropout_seed": 0,
    "dropout_offset": 0,
    "dropout_shard": None,
    "q_offset": None,
    "k_offset": 0,
    "kv_lengths": None,
    "layout": "bshd",
    "backend": None,
}

_INT64 = (-(2**63), 2**63 - 1)
_UINT64 = (0, 2**64 - 1)


class _Reader:
    """Turns the given keyword options of one function into `_core.Options`."""

    def __init__(self, function: str) -> None:
        self.function = function

    def fail(self, kind: type[Exception], name: str, got: object, expected: str) -> NoReturn:
        text = f"{self.function}: {name} ({got!r}) must {expected}"
        raise kind(text)

    def integer(self, name: str, value: object, limits: tuple[int, int]) -> int:
        if isinstance(value, (bool, np.bool_)):
            self.fail(TypeError, name, value, "be an int")
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            self.fail(TypeError, name, value, "be an int")
        if not limits[0] <= number <= limits[1]:
            self.fail(ValueError, name, value, f"be between {limits[0]} and {limits[1]}")
        return number

    def real(self, name: str, value: object) -> float:
        if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
            self.fail(TypeError, name, value, "be a real number")
        return float(value)

    def per_batch(self, name: str, value: Any) -> Any:
        """One integer per batch entry: sequences become int64, arrays stay what they are.

        The host reads them, so tensors of torch's Metal device are copied to it.
        """
        if isinstance(value, (list, tuple)):
            return np.array([self.integer(name, item, _INT64) for item in value], np.int64)
        if getattr(getattr(value, "device", None), "type", None) == "mps":
            return value.cpu()
        return value

    def scale(self, options: Options, value: object) -> None:
        if value is not None:
            options.scale = self.real("scale", value)

    def causal(self, options: Options, value: object) -> None:
        if isinstance(value, (bool, np.bool_)):
            options.causal = Causal.BOTTOM_RIGHT if value else Causal.NONE
        elif isinstance(value, str):
            if value != "top_left":
                self.fail(ValueError, "causal", value, 'be False, True or "top_left"')
            options.causal = Causal.TOP_LEFT
        else:
            self.fail(TypeError, "causal", value, 'be False, True or "top_left"')

    def window(self, options: Options, value: Any) -> None:
        expected = "be a pair of ints (left, right), each at least -1"
        try:
            left, right = value
        except (TypeError, ValueError):
            self.fail(ValueError, "window", value, expected)
        try:
            options.window = [self.integer("window", side, _INT64) for side in (left, right)]
        except TypeError:
            self.fail(ValueError, "window", value, expected)

    def softcap(self, options: Options, value: object) -> None:
        options.softcap = cap = self.real("softcap", value)
        if cap > 0 and np.float32(cap) == 0:
            self.fail(ValueError, "softcap", value, "be 0 (off), or above 0 in float32 too")

    def dropout_p(self, options: Options, value: object) -> None:
        options.dropout_p = self.real("dropout_p", value)

    def dropout_seed(self, options: Options, value: object) -> None:
        options.dropout_seed = self.integer("dropout_seed", value, _UINT64)

    def dropout_offset(self, options: Options, value: object) -> None:
        options.dropout_offset = self.integer("dropout_offset", value, _UINT64)

    def dropout_shard(self, options: Options, value: object) -> None:
        if value is None:
            return
        if not isinstance(value, DropoutShard):
            self.fail(TypeError, "dropout_shard", value, "be a DropoutShard")
        options.dropout_shard = [
            self.integer(f"dropout_shard.{field}", item, _INT64)
            for field, item in zip(value._fields, value, strict=True)
        ]

    def q_offset(self, options: Options, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, (int, np.integer)):
            options.q_offset = self.integer("q_offset", value, _INT64)
        else:
            options.q_offsets = self.per_batch("q_offset", value)

    def k_offset(self, options: Options, value: object) -> None:
        options.k_offset = self.integer("k_offset", value, _INT64)

    def kv_lengths(self, options: Options, value: Any) -> None:
        options.kv_lengths = self.per_batch("kv_lengths", value)

    def mask(self, options: Options, value: Any) -> None:
        options.mask = value

    def alibi_slopes(self, options: Options, value: Any) -> None:
        options.alibi_slopes = value

    def sinks(self, options: Options, value: Any) -> None:
        options.sinks = value

    def layout(self, options: Options, value: object) -> None:
        if value not in ("bshd", "bhsd"):
            self.fail(ValueError, "layout", value, 'be "bshd" or "bhsd"')
        options.heads_first = value == "bhsd"

    def backend(self, options: Options, value: object) -> None:
        if value is None:
            return
        if not isinstance(value, str):
            self.fail(TypeError, "backend", value, "be a backend's name")
        options.backend = value


_NAMES = tuple(DEFAULTS)
_SETTERS: dict[str, Callable[[_Reader, Options, Any], None]] = {
    name: getattr(_Reader, name) for name in _NAMES
}
_READERS: dict[str, _Reader] = {}
_PLAIN = Options()


def parse(function: str, given: Mapping[str, Any]) -> Options:
    """Options for the core out of a call's keywords. The result may be shared: do not change it.

    Raises:
        TypeError: an unknown name, or a value of the wrong kind.
        ValueError: a value that can be refused without looking at the arrays.
    """
    if not given:
        return _PLAIN
    reader = _READERS.get(function)
    if reader is None:
        reader = _READERS[function] = _Reader(function)
    options = Options()
    for name, value in given.items():
        setter = _SETTERS.get(name)
        if setter is None:
            known = ", ".join(_NAMES)
            raise TypeError(f"{function}: unknown option {name!r}; the options are {known}")
        setter(reader, options, value)
    return options


def parse_own(function: str, given: Mapping[str, Any]) -> Options:
    """As `parse`, but the result is the caller's to change."""
    return parse(function, given) if given else Options()


def per_batch_integers(function: str, name: str, value: Any) -> Any:
    """An argument of integers: a sequence becomes an int64 array, an array stays what it is."""
    return _Reader(function).per_batch(name, value)


def sizes(function: str, name: str, value: Any, count: int, least: int = 0) -> tuple[int, ...]:
    """An argument of `count` sizes, each at least `least`."""
    reader = _Reader(function)
    try:
        given = tuple(value)
    except TypeError:
        reader.fail(TypeError, name, value, f"be {count} ints")
    if len(given) != count:
        reader.fail(ValueError, name, value, f"be {count} ints")
    return tuple(reader.integer(name, item, (least, _INT64[1])) for item in given)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def documents_options(function: _Function) -> _Function:
    """Writes the options into a function's docstring and signature, in place of `**options`."""
    if function.__doc__ and AttentionOptions.__doc__:  # `python -OO` has neither
        text = inspect.cleandoc(AttentionOptions.__doc__).partition("Attributes:\n")[2]
        lines = inspect.cleandoc(function.__doc__).split("\n")
        start = next(n for n, line in enumerate(lines) if line.lstrip().startswith("**options"))
        end = next(n for n in range(start, len(lines)) if not lines[n].strip())
        function.__doc__ = "\n".join(lines[:end] + text.rstrip().split("\n") + lines[end:])
    signature = inspect.signature(function)
    annotations = AttentionOptions.__annotations__
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=DEFAULTS[name],  # type: ignore[literal-required]
            annotation=getattr(annotations[name], "__forward_arg__", annotations[name]),
        )
        for name in _NAMES
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function
