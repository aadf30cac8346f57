"""`core`: the compiled module with the functions that builds with the Metal backend alone have.

Its type is Any: the module's stub is of the build at hand.
"""

from __future__ import annotations

from typing import Any

from flashattn import _core

core: Any = _core
