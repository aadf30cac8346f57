"""What a call needs from the framework of its arrays, and the shapes of its results.

`_arrays` has numpy and other producers of arrays, `_torch` has torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


def output_shapes(
    query_shape: tuple[int, ...], value_shape: tuple[int, ...], heads_first: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse. Only the number of axes is checked; every other rule is the core's.

    Raises:
        ValueError: query or value does not have four axes.
    """
    if len(query_shape) != 4 or len(value_shape) != 4:
        name, shape = ("query", query_shape) if len(query_shape) != 4 else ("value", value_shape)
        raise ValueError(f"attention: {name}.ndim ({len(shape)}) must be 4")
    batch, second, third, _ = query_shape
    lse_shape = (batch, second, third) if heads_first else (batch, third, second)
    return (batch, second, third, value_shape[3]), lse_shape


def packed_shapes(
    query_shape: tuple[int, ...], value_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse for packed sequences; value may be pages.

    Raises:
        ValueError: query does not have three axes, or value neither three nor four.
    """
    if len(query_shape) != 3:
        raise ValueError(f"attention_varlen: query.ndim ({len(query_shape)}) must be 3")
    if len(value_shape) not in (3, 4):
        raise ValueError(f"attention_varlen: value.ndim ({len(value_shape)}) must be 3")
    rows, heads, _ = query_shape
    return (rows, heads, value_shape[-1]), (heads, rows)


class Framework(Protocol):
    """What a call needs from the framework that its arrays come from. New arrays are contiguous."""

    def forward_outputs(self, query: Any, value: Any, heads_first: bool) -> tuple[Any, Any]:
        """Uninitialised (out, lse) on query's device; out in query's dtype, lse float32."""

    def packed_outputs(self, query: Any, value: Any) -> tuple[Any, Any]:
        """The same for packed sequences."""

    def gradient(self, array: Any) -> Any:
        """Uninitialised, in array's shape and dtype."""

    def wide_gradient(self, array: Any) -> Any:
        """Uninitialised, in array's shape; float64 for a float64 array, else float32."""

    def is_output(self, array: Any) -> bool:
        """Whether `array` may be given as `out=`."""

    def written(self, *arrays: Any) -> None:
        """Tells the framework that the memory of its arrays has changed."""

    def finish(self, array: Any, like: Any) -> Any:
        """The result in the caller's framework, from an array made here."""

    def draw_seed(self) -> int:
        """63 random bits from the framework's own generator."""

    def is_special(self, query: Any, key: Any, value: Any) -> bool:
        """Whether the framework's state asks for autocast() and is_dispatched()."""

    def autocast(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """The arrays in the dtype that the framework's state asks for."""

    def is_dispatched(self, query: Any, key: Any, value: Any) -> bool:
        """Whether the framework must see the call as an operator of its own."""

    def dispatch(
        self, function: str, query: Any, key: Any, value: Any, out: Any, options: Any
    ) -> tuple[Any, Any]:
        """(out, lse) by that operator, which the framework may differentiate."""

    def dispatch_raw(self, function: str, tensors: Any, out: Any, options: Any) -> tuple[Any, Any]:
        """(out, lse) of (query, key, value) by that operator, without a gradient."""

    def dispatch_backward(
        self, function: str, results: Any, tensors: Any, options: Any
    ) -> tuple[Any, ...]:
        """The six gradients of (query, key, value) from (dout, dlse, out, lse) likewise."""

    def kvcache(
        self, tensors: Any, own: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Any, Any] | None:
        """attention_kvcache by the framework's own means; None where the core does it.

        Args:
            tensors: query, k_cache, v_cache.
            own: the arguments that no other call has, and out.
            options: the options, and block_table.
        """

    def merge(self, outs: list[Any], lses: list[Any], heads_first: bool) -> tuple[Any, Any] | None:
        """merge_attention by the framework's own means; None where the core does it."""


class NothingSpecial:
    """A framework without autocast, tracing or transforms."""

    def is_special(self, query: Any, key: Any, value: Any) -> bool:
        return False

    def autocast(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        return query, key, value

    def is_dispatched(self, query: Any, key: Any, value: Any) -> bool:
        return False

    def dispatch(
        self, function: str, query: Any, key: Any, value: Any, out: Any, options: Any
    ) -> tuple[Any, Any]:
        raise AssertionError("unreachable: is_dispatched is False")

    def dispatch_raw(self, function: str, tensors: Any, out: Any, options: Any) -> tuple[Any, Any]:
        raise AssertionError("unreachable: is_dispatched is False")

    def dispatch_backward(
        self, function: str, results: Any, tensors: Any, options: Any
    ) -> tuple[Any, ...]:
        raise AssertionError("unreachable: is_dispatched is False")

    def kvcache(
        self, tensors: Any, own: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Any, Any] | None:
        return None

    def merge(self, outs: list[Any], lses: list[Any], heads_first: bool) -> tuple[Any, Any] | None:
        return None
