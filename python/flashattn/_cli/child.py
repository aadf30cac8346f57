"""Work in a process of its own: `python -m flashattn._cli.child MODULE`, request in, result out.

Memory can only be measured, an instruction set only be risked, and a competitor only be timed
without its threads disturbing ours, in a separate process. The request is JSON on standard input;
the named module's `work(request)` gives the result, the last line of standard output.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any


def run_child(
    module: str,
    request: dict[str, Any],
    environment: dict[str, str] | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """`work(request)` of a module, in a new process.

    A crash, or one that takes longer than `seconds`, gives {"error": text}.
    """
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "flashattn._cli.child", module],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env={**os.environ, **(environment or {})},
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {seconds:g} seconds"}
    last = finished.stdout.rstrip().rpartition("\n")[2]
    if finished.returncode == 0 and last.startswith("{"):
        result: dict[str, Any] = json.loads(last)
        return result
    reason = finished.stderr.strip().rpartition("\n")[2] or f"exit status {finished.returncode}"
    return {"error": reason}


def main() -> None:
    """Answers one request."""
    request = json.load(sys.stdin)
    result = importlib.import_module(sys.argv[1]).work(request)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
