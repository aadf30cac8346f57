"""A pytest plugin for a build over the simulated Metal device: no test may leave Metal objects.

`pytest -p live_objects` with this folder on PYTHONPATH. After every test the classes that a call
makes and drops must have no instance; pipelines, libraries and pooled buffers are kept on purpose.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import pytest

TRANSIENT = (
    "MTLCommandBuffer",
    "MTLComputeCommandEncoder",
    "MTLComputePipelineDescriptor",
    "MTLCompileOptions",
    "MTLFunctionConstantValues",
    "NSArray",
    "NSAutoreleasePool",
    "NSError",
    "NSProcessInfo",
    "NSString",
    "NSURL",
)


def _live(library: ctypes.CDLL) -> dict[str, int]:
    """Instances of the transient classes that exist now."""
    counts = {name: library.flashattn_simulated_live_instances(name.encode()) for name in TRANSIENT}
    return {name: count for name, count in counts.items() if count != 0}


@pytest.fixture(scope="session")
def simulated_runtime() -> ctypes.CDLL:
    from flashattn import _core

    library = ctypes.CDLL(_core.__file__)
    library.flashattn_simulated_live_instances.restype = ctypes.c_long
    library.flashattn_simulated_live_instances.argtypes = [ctypes.c_char_p]
    return library


@pytest.fixture(autouse=True)
def no_live_objects(simulated_runtime: ctypes.CDLL) -> Iterator[None]:
    yield
    # A queue's thread lets go of a command buffer a moment after the wait for it ends.
    deadline = time.monotonic() + 2
    while _live(simulated_runtime) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _live(simulated_runtime)
