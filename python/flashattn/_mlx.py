"""Attention of MLX arrays, differentiable through `mx.custom_function`.

MLX is lazy: a call evaluates its inputs, computes at once, and returns finished arrays. So it works
under mx.grad, mx.vjp and mx.checkpoint, which trace real values, and not under mx.compile or
mx.vmap, which trace none: MLX refuses the evaluation there. MLX does not say which gradients are
wanted, so all are computed, a floating mask's too. Imported when the first MLX array arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx
import numpy as np

from flashattn import _api, _core, _varlen
from flashattn._arrays import DispatchingFramework
from flashattn._metal import MetalArray, is_on_metal
from flashattn._options import parse_own

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DIFFERENTIABLE = ("mask", "alibi_slopes", "sinks")
_RAW = "attention_forward and attention_backward are not differentiable: flashattn.attention is"


class MlxFramework(DispatchingFramework):
    """MLX arrays, on a Mac in Metal memory. Results are copied once, into arrays of MLX's own."""

    arrays = "MLX arrays"

    def _new(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        if is_on_metal(like):
            return MetalArray(like, shape, dtype)
        return super()._new(like, shape, dtype)

    def finish(self, array: Any, like: Any) -> Any:
        _core.settle()
        if isinstance(array, MetalArray):
            array = array.numpy()
        if array.dtype.name == "bfloat16":
            return mx.array(array.view(np.uint16)).view(mx.bfloat16)
        return mx.array(array)

    def draw_seed(self) -> int:
        words = mx.random.randint(0, 2**31 - 1, (2,), mx.int32).tolist()
        return int(words[0]) | int(words[1]) << 31

    def dispatch(
        self, function: str, query: Any, key: Any, value: Any, out: Any, options: Any
    ) -> tuple[Any, Any]:
        self.refuse_out(function, out)
        parsed, forward = _parse(function, options)
        if parsed.dropout_p > 0 and "dropout_seed" not in options:
            parsed.dropout_seed = self.draw_seed()
        arrays = [query, key, value, *(getattr(parsed, name) for name in _DIFFERENTIABLE)]
        return self._differentiable(parsed, forward, arrays)

    def _differentiable(
        self, parsed: _core.Options, forward: Any, arrays: list[Any]
    ) -> tuple[Any, Any]:
        """(out, lse) as one operation of MLX's graph; `arrays` may hold None."""
        present = [index for index, array in enumerate(arrays) if array is not None]

        def run(*given: Any) -> tuple[Any, Any]:
            options = self._filled(parsed, present, given)
            mx.eval(*given)
            result: tuple[Any, Any] = forward(self, *given[:3], options, None)
            return result

        def run_backward(*flat: Any) -> tuple[Any, ...]:
            *given, dout, dlse, out, lse = flat
            options = self._filled(parsed, present, given)
            mx.eval(*flat)
            full: list[Any] = [None] * len(arrays)
            for index, array in zip(present, given, strict=True):
                full[index] = array
            wanted = _api.gradients_wanted(options)
            # A gradient of lse that nobody asked for arrives as zeros, and would cost time.
            dlse = dlse if mx.any(dlse).item() else None
            found = _api.gradients(self, options, dout, dlse, out, lse, wanted, *full)
            return tuple(_in_dtype_of(full[n], found[n]) for n in present)

        def vjp(given: Any, cotangents: Any, results: Any) -> Any:
            once = _operation(run_backward, "attention: a second derivative is not supported")
            return once(*given, *cotangents, *results)

        operation = _operation(run, "attention: forward mode is not supported")
        operation.vjp(vjp)
        out, lse = operation(*[arrays[index] for index in present])
        return out, lse

    def _filled(
        self, parsed: _core.Options, present: Sequence[int], given: Sequence[Any]
    ) -> _core.Options:
        """The options, with the arrays that MLX hands in for those that were given."""
        for index, array in zip(present[3:], given[3:], strict=True):
            setattr(parsed, _DIFFERENTIABLE[index - 3], array)
        return parsed

    def dispatch_raw(self, function: str, tensors: Any, out: Any, options: Any) -> tuple[Any, Any]:
        self.refuse_out(function, out)
        parsed, forward = _parse(function, options)

        def run(*given: Any) -> tuple[Any, Any]:
            mx.eval(*given)
            result: tuple[Any, Any] = forward(self, *given, parsed, None)
            return result

        out, lse = _operation(run, _RAW)(*tensors)
        return out, lse

    def dispatch_backward(
        self, function: str, results: Any, tensors: Any, options: Any
    ) -> tuple[Any, ...]:
        parsed, _ = _parse(function, options)
        dout, dlse, out, lse = results
        mx.eval(*tensors, *(x for x in results if x is not None))
        arrays = (*tensors, parsed.mask, parsed.alibi_slopes, parsed.sinks)
        wanted = _api.gradients_wanted(parsed)
        return tuple(_api.gradients(self, parsed, dout, dlse, out, lse, wanted, *arrays))


def _operation(run: Any, refusal: str) -> Any:
    """`run` as one operation whose derivatives raise, where MLX would go on with zeros."""

    def refuse(*arguments: Any) -> NoReturn:
        raise RuntimeError(refusal)

    operation = mx.custom_function(run)
    operation.vjp(refuse)
    operation.jvp(refuse)
    return operation


def _in_dtype_of(array: Any, gradient: Any) -> Any:
    """The gradient as MLX wants it; of an array that has none, zeros."""
    if gradient is None:
        return mx.zeros(array.shape, array.dtype)
    return gradient.astype(array.dtype)


def _parse(function: str, given: Mapping[str, Any]) -> tuple[_core.Options, Any]:
    """The core's options, and the function here that makes the call."""
    options = dict(given)
    for name in _DIFFERENTIABLE:
        if isinstance(options.get(name), np.ndarray):
            options[name] = mx.array(options[name])
    seed = options.get("dropout_seed")
    if isinstance(seed, mx.array):  # a key of mx.random
        if seed.dtype != mx.uint32 or seed.shape != (2,):
            raise TypeError(f"{function}: dropout_seed ({seed.dtype}) must be an int or a key")
        low, high = seed.tolist()
        options["dropout_seed"] = low | high << 32
    if not function.startswith("attention_varlen"):
        return parse_own(function, options), _api.forward
    rows, keys, table = (
        options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table")
    )
    return _varlen.parse_packed(function, rows, keys, table, options), _varlen.forward


FRAMEWORK = MlxFramework()
