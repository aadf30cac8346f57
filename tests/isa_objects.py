"""Looks into the object of one instruction set for anything that could run on an older processor.

A weak symbol (an inline function, a template of the standard library) may be the copy that the
linker keeps for the whole program, and a global one outside of the instruction set's namespace
could be called by anyone. CTest runs `python isa_objects.py NM NAME OBJECT` for each instruction
set; test_isa_objects.py tests the rules themselves.
"""

from __future__ import annotations

import subprocess
import sys


def faults(listing: str, isa: str) -> list[str]:
    """What is wrong with an object, one line each; `listing` is what `nm -P` prints for it."""
    name = f"isa_{isa}"
    own = f"_ZN9flashattn3cpu{len(name)}{name}"
    found = []
    exports_table = False
    for line in listing.splitlines():
        symbol, kind = line.split()[:2]
        if kind in "WwVvu":
            found.append(f"weak or unique: {symbol}")
        elif kind == "U":
            if symbol.startswith("_Z"):
                found.append(f"calls C++ code outside of the object: {symbol}")
        elif kind.isupper() and not symbol.startswith(own):
            found.append(f"global outside of flashattn::cpu::{name}: {symbol}")
        exports_table = exports_table or (kind.isupper() and symbol == f"{own}8kKernelsE")
    if not exports_table:
        found.append(f"no flashattn::cpu::{name}::kKernels")
    return found


def main() -> int:
    nm, isa, path = sys.argv[1:]
    listing = subprocess.run([nm, "-P", path], capture_output=True, text=True, check=True).stdout
    found = faults(listing, isa)
    for fault in found:
        print(f"{path}: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
