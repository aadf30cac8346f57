"""Versions, build, instruction sets, threads and backends: what a bug report needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashattn._machine import config, config_lines

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The facts, as flashattn.show_config("dict") gives them."""
    return config()


def lines(result: dict[str, Any]) -> list[str]:
    """The facts as text."""
    return config_lines(result)
