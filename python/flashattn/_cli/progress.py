"""Progress of long work on standard error, when `rich` is there and someone is watching."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_Item = TypeVar("_Item")


def progress(items: Sequence[_Item], description: str) -> Iterable[_Item]:
    """The items, with a progress bar where one can be shown."""
    if not sys.stderr.isatty():
        return items
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    shown: Iterable[_Item] = track(items, description, console=Console(stderr=True), transient=True)
    return shown
