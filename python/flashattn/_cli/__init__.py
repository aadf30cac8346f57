"""The command line: `python -m flashattn info | demo | check | bench | tune`, each with `--json`.

Each command is a module with `add_arguments(parser)`, `run(arguments)` giving plain values, and
`lines(result)` giving their text. With --json the plain values are printed as one JSON object and
nothing else goes to standard output.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from flashattn._cli import bench, check, demo, info, tune

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = {"info": info, "demo": demo, "check": check, "bench": bench, "tune": tune}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Exit status 0; 1 when numbers came out wrong; 2 for a usage error."""
    parser = argparse.ArgumentParser(prog="python -m flashattn", description="Exact attention.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        module.add_arguments(command)
    parsed = parser.parse_args(arguments)
    module = _COMMANDS[parsed.command]
    result = module.run(parsed)
    print(json.dumps(result, indent=2) if parsed.json else "\n".join(module.lines(result)))
    return 1 if result.get("right") is False else 0
