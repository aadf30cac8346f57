"""torch tensors: memory for results, autograd, and tensors that need work before they can be read.

Imported when the first torch tensor arrives. Nothing is compiled against torch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from flashattn import _core, _merge
from flashattn._framework import output_shapes, packed_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_core.register_torch(torch.Tensor, torch.nn.Parameter)

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
_is_compiling = torch.compiler.is_compiling
# Private names of torch; there are no public ones. functorch's transforms make tensors that have no
# memory and yet the plain type.
_autocasts_somewhere = torch._C._is_any_autocast_enabled
_transform = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack


class TorchFramework:
    """Results are torch tensors on the query's device.

    empty_like and sizes as separate arguments take half the time of new_empty(shape), and a small
    call consists of little else.
    """

    def forward_outputs(self, query: Any, value: Any, heads_first: bool) -> tuple[Any, Any]:
        query = _plain(query)
        shape = query.shape
        out_shape, lse_shape = output_shapes(shape, value.shape, heads_first)
        same = out_shape[3] == shape[3] and query.is_contiguous()
        out = torch.empty_like(query) if same else query.new_empty(*out_shape)
        if query.dtype is torch.float32:
            return out, query.new_empty(*lse_shape)
        return out, query.new_empty(*lse_shape, dtype=torch.float32)

    def packed_outputs(self, query: Any, value: Any) -> tuple[Any, Any]:
        query = _plain(query)
        out_shape, lse_shape = packed_shapes(query.shape, value.shape)
        return query.new_empty(out_shape), query.new_empty(lse_shape, dtype=torch.float32)

    def gradient(self, array: Any) -> Any:
        return torch.empty_like(_plain(array), memory_format=torch.contiguous_format)

    def wide_gradient(self, array: Any) -> Any:
        wide = torch.float64 if array.dtype is torch.float64 else torch.float32
        return _plain(array).new_empty(array.shape, dtype=wide)

    def is_output(self, array: Any) -> bool:
        return isinstance(array, torch.Tensor)

    def written(self, *arrays: Any) -> None:
        # So that autograd notices where a graph has saved the tensor.
        for array in arrays:
            torch.autograd.graph.increment_version(array)

    def finish(self, array: Any, like: Any) -> Any:
        # Autograd's engine, a graph's next operation and torch's own queues know of no stream.
        _core.settle()
        return array

    def draw_seed(self) -> int:
        return int(torch.randint(0, 2**63 - 1, (), device="cpu").item())

    def is_special(self, query: Any, key: Any, value: Any) -> bool:
        # On the way of every call: one expression, cheapest where nothing is special.
        return (
            _is_compiling()
            or _autocasts_somewhere()
            or _transform() is not None
            or _dispatch_modes() > 0
            or type(query) not in _PLAIN_TYPES
            or type(key) not in _PLAIN_TYPES
            or type(value) not in _PLAIN_TYPES
        )

    def autocast(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """What torch's own attention is cast to: any dtype but float64."""
        device = query.device.type
        if not torch.is_autocast_enabled(device):
            return query, key, value
        wanted = torch.get_autocast_dtype(device)
        cast = [x if x.dtype is torch.float64 else x.to(wanted) for x in (query, key, value)]
        return cast[0], cast[1], cast[2]

    def is_dispatched(self, query: Any, key: Any, value: Any) -> bool:
        return (
            _is_compiling()
            or _transform() is not None
            or _dispatch_modes() > 0
            or not {type(query), type(key), type(value)} <= _PLAIN_TYPES
        )

    def dispatch(
        self, function: str, query: Any, key: Any, value: Any, out: Any, options: Any
    ) -> tuple[Any, Any]:
        from flashattn import _torch_ops

        if out is not None:
            raise ValueError(f"{function}: out must not be given where torch traces or transforms")
        return _torch_ops.dispatch(function, query, key, value, options)

    def dispatch_raw(self, function: str, tensors: Any, out: Any, options: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            query, key, value = tensors
            return self.dispatch(function, query, key, value, out, options)

    def dispatch_backward(
        self, function: str, results: Any, tensors: Any, options: Any
    ) -> tuple[Any, ...]:
        from flashattn import _torch_ops

        with torch.no_grad():
            return _torch_ops.dispatch_backward(function, results, tensors, options)

    def kvcache(
        self, tensors: Any, own: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Any, Any] | None:
        if not (self.is_special(*tensors) and self.is_dispatched(*tensors)):
            return None
        from flashattn import _torch_cache_ops

        return _torch_cache_ops.dispatch(tensors, own, options)

    def merge(self, outs: list[Any], lses: list[Any], heads_first: bool) -> tuple[Any, Any] | None:
        pairs = [(out, out, lse) for out, lse in zip(outs, lses, strict=True)]
        if not any(self.is_special(*pair) and self.is_dispatched(*pair) for pair in pairs):
            return None
        from flashattn import _torch_merge_ops

        return _torch_merge_ops.dispatch(outs, lses, heads_first)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in _PLAIN_TYPES:
        return tensor
    return tensor.as_subclass(torch.Tensor)


def _is_dual(array: Any) -> bool:
    if not isinstance(array, torch.Tensor):
        return False
    return forward_ad.unpack_dual(array).tangent is not None  # type: ignore[no-untyped-call]


def records_gradient(*arrays: Any) -> bool:
    """Whether autograd must know of a call on these arrays (Nones and non-tensors are ignored)."""
    # A raw call would lose a dual tensor's tangent; the autograd function refuses it loudly. The
    # level is torch's private name: a torch without it is asked about every tensor.
    level = getattr(forward_ad, "_current_level", None)
    if level >= 0 if level is not None else any(map(_is_dual, arrays)):
        return True
    if not torch.is_grad_enabled():
        return False
    for array in arrays:  # noqa: SIM110 - on the way of every call, and any() takes twice as long
        if array is not None and getattr(array, "requires_grad", False):
            return True
    return False


class AttentionFunction(torch.autograd.Function):
    """Attention as one autograd node with outputs (out, lse). Not twice differentiable."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], gradients: Callable[..., Any], *tensors: Any
    ) -> Any:
        """`run` gives (out, lse), `gradients(dout, dlse, out, lse, wanted, *tensors)` theirs.

        tensors: query, key, value, mask, alibi_slopes, sinks; the last three may be None.
        """
        out, lse = run(*tensors)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.gradients = gradients
        # A None tells "no gradient arrives", which saves the work of a zero dlse.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        """Gradients of the six tensors, None where none is wanted."""
        out, lse, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 8
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = ctx.needs_input_grad[2:]
        return (None, None, *ctx.gradients(dout, dlse, out, lse, wanted, *tensors))


class MergeFunction(torch.autograd.Function):
    """merge_attention as one autograd node with outputs (out, lse). Not twice differentiable."""

    @staticmethod
    def forward(ctx: Any, framework: Any, heads_first: bool, *tensors: Any) -> Any:
        """tensors: all outs and then all lses."""
        ctx.save_for_backward(*tensors)
        ctx.framework, ctx.heads_first = framework, heads_first
        ctx.set_materialize_grads(False)
        return _merge.run(framework, *_halves(tensors), heads_first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (2 + len(tensors))
        if dout is None:
            dout = torch.zeros_like(tensors[0])
        wanted = ctx.needs_input_grad[2:]
        parts = (*_halves(tensors), ctx.heads_first)
        return (None, None, *_merge.gradients(ctx.framework, dout, dlse, wanted, *parts))


def _halves(tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    count = len(tensors) // 2
    return list(tensors[:count]), list(tensors[count:])


def record_merge(
    framework: Any, outs: Sequence[Any], lses: Sequence[Any], heads_first: bool
) -> tuple[Any, Any]:
    """A merge as one node of the graph."""
    apply: Any = MergeFunction.apply
    result: tuple[Any, Any] = apply(framework, heads_first, *outs, *lses)
    return result


class _MetalTensor:
    """A tensor of torch's Metal device ("mps") as a DLPack producer of its MTLBuffer.

    torch queues its commands on a queue of its own and DLPack carries no stream for Metal, so what
    is queued is awaited before the memory changes hands. Results need none: a call of this package
    has waited for the GPU when it returns.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        # Bits of lazily negated views are in no DLPack export.
        self._tensor = tensor.resolve_neg() if tensor.is_neg() else tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._tensor.__dlpack_device__()
        return int(kind), number

    def __dlpack__(self, **options: Any) -> Any:
        torch.mps.synchronize()
        return self._tensor.__dlpack__(**options)


def adapt(label: str, tensor: torch.Tensor, writable: bool) -> tuple[Any, bool, bool]:
    """A tensor that the core can import, for one that it cannot; see flashattn._arrays.adapt."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"{label}.layout ({tensor.layout}) must be torch.strided")
    if tensor.device.type == "mps":
        return _MetalTensor(tensor), False, False
    if tensor.device.type != "cpu":
        raise ValueError(f"{label}.device ({tensor.device}) must be cpu or mps")
    if tensor.ndim > 4:
        raise ValueError(f"{label}.ndim ({tensor.ndim}) must be at most 4")
    if tensor.is_quantized:
        raise TypeError(f"{label}.dtype ({tensor.dtype}) must not be quantized")
    plain = _plain(tensor.detach())
    copied = plain.is_neg()
    if copied:
        _core.settle()
        plain = plain.resolve_neg()
    address = 0
    if not hasattr(tensor, "fake_mode"):  # asking a fake tensor for its address is a warning
        with contextlib.suppress(RuntimeError):
            address = plain.data_ptr()
    if address == 0 and plain.numel() != 0:
        raise TypeError(
            f"{label} must have memory of its own (this is a fake, vmapped or symbolic tensor)"
        )
    if address % plain.element_size() != 0:
        _core.settle()
        copied, plain = True, plain.clone()
    if copied and writable:
        raise ValueError(f"{label} must be aligned to its item size and not a negated view")
    return plain, False, copied
