"""torch: its scaled_dot_product_attention on strided and on contiguous tensors, and flex_attention.

Strided is what a projection of (batch, seqlen, heads, dim) gives; contiguous is torch's own layout,
(batch, heads, seqlen, dim). A window is a boolean mask for the former, a block mask for the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cells import threads_of

from sides.common import Call, sizes_of


def _inputs(cell: dict[str, Any], strided: bool) -> list[Any]:
    import torch

    torch.set_num_threads(threads_of(cell))
    torch.manual_seed(0)
    sizes, dtype = sizes_of(cell), getattr(torch, cell["dtype"])
    if strided:
        return [torch.randn(s).to(dtype).transpose(1, 2) for s in sizes.bshd()]
    return [torch.randn(s).to(dtype) for s in sizes.bhsd()]


def _timed(cell: dict[str, Any], attend: Callable[..., Any], inputs: list[Any]) -> Call:
    """The pass of the cell; backward runs again and again through one graph."""
    import torch

    *leaves, dout = inputs
    if cell["pass"] != "backward":
        return lambda: attend(*leaves)
    for x in leaves:
        x.requires_grad_()
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _sdpa(cell: dict[str, Any], strided: bool) -> Call:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    inputs, sizes = _inputs(cell, strided), sizes_of(cell)
    options: dict[str, Any] = {"is_causal": cell["causal"], "enable_gqa": sizes.is_grouped}
    if "window" in cell:
        rows, keys = torch.arange(sizes.seqlen_q)[:, None], torch.arange(sizes.seqlen_k)
        seen = (keys <= rows) & (keys > rows - cell["window"])
        options |= {"is_causal": False, "attn_mask": seen}
    return _timed(cell, lambda q, k, v: scaled_dot_product_attention(q, k, v, **options), inputs)


def torch(cell: dict[str, Any]) -> Call:
    """On (batch, seqlen, heads, dim) memory."""
    return _sdpa(cell, strided=True)


def torch_contiguous(cell: dict[str, Any]) -> Call:
    """On (batch, heads, seqlen, dim) memory."""
    return _sdpa(cell, strided=False)


def flex(cell: dict[str, Any]) -> Call:
    """flex_attention compiled for exactly this shape."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if cell["pass"] == "backward":
        raise NotImplementedError("flex_attention has no backward on the CPU")
    inputs, sizes = _inputs(cell, strided=False), sizes_of(cell)
    window = cell.get("window")

    def seen(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (key <= row) if window is None else (key <= row) & (key > row - window)

    mask = None
    if cell["causal"]:
        shape = (sizes.seqlen_q, sizes.seqlen_k)
        mask = create_block_mask(seen, None, None, *shape, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    grouped = sizes.is_grouped
    return _timed(
        cell, lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped), inputs
    )
