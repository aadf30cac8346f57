"""Metal calls that do not wait for the GPU.

A call returns when its results are there. Within

>>> with flashattn.metal.stream() as stream:
...     out, lse = flashattn.attention_forward(q, k, v, backend="metal")
...     grads = flashattn.attention_backward(dout, q, k, v, out, lse, backend="metal")

it returns when the GPU has been given the work: the second call is computed behind the first one,
whose results it reads, and nobody waits in between. Leaving the block waits, as
`stream.synchronize()` does. Until then results and inputs belong to the GPU: other calls of this
package may take them, everything else has to leave them alone.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from flashattn import _core
from flashattn._machine import backends


class Stream:
    """The calls of one thread between entering and leaving a `with` block; see `stream`."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._thread: int | None = None  # the one that has entered

    def __enter__(self) -> Stream:
        if self._thread is not None:
            raise RuntimeError("stream: entered already; nested blocks take a stream each")
        self._core.metal_open_stream()
        self._thread = threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._check_thread()
        self._thread = None
        failure = self._core.metal_close_stream()
        if not failure:
            return
        if error is None:
            raise RuntimeError(failure)
        if hasattr(error, "add_note"):
            error.add_note(f"Besides, in the stream: {failure}")

    def synchronize(self) -> None:
        """Waits for every call so far; from then on their arrays may be used in every way.

        Raises:
            RuntimeError: a call failed on the device (the first one is told; results of it and of
                later calls are void), or this is not the thread inside the `with` block.
        """
        self._check_thread()
        failure = self._core.metal_synchronize()
        if failure:
            raise RuntimeError(failure)

    def _check_thread(self) -> None:
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "stream: only the thread inside its `with` block can synchronise or leave it"
            )


def stream() -> Stream:
    """A context manager within which this thread's Metal calls return before they are done.

    Calls are computed in their order. At most a handful is under way: one more waits for the
    oldest. Arrays are kept alive until the GPU is done with them. Some calls wait all the same: the
    first one with kernels that this process has not seen to work yet, those whose results cannot be
    written in place, and those that give new arrays of torch, JAX or MLX, which compute with them
    unasked. The package itself waits before it touches arrays that are in use (calls of the CPU
    backend, merge_attention, appending to a cache).

    Errors of values and shapes are raised by the call; failures of the device at the end of the
    block or by `synchronize`, and as a note on an exception that leaves the block. Afterwards calls
    work again. Streams nest: the inner one's end waits for the calls of both. Other threads are not
    concerned: their calls wait, and must not take arrays of calls that are still under way here.

    Raises:
        NotImplementedError: there is no Metal device to be used; the text has the reason.
    """
    reasons = {info.name: info.reason for info in backends() if not info.available}
    if not hasattr(_core, "metal_open_stream"):
        raise NotImplementedError("stream: this build has no Metal backend")
    if "metal" in reasons:
        raise NotImplementedError(f"stream: {reasons['metal']}")
    return Stream(_core)
