"""Kernel declarations and explicit instantiations: what the program offers to the host, by name.

Reads token ranges, writes nothing; rewrite.py finds the ranges and tables.py prints what is
collected here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokens import (
    Token,
    TranslationError,
    join,
    matching,
    matching_angle,
    significant,
    split,
)

POSITIONS = {
    "threadgroup_position_in_grid": "threadgroup_position_in_grid",
    "threadgroups_per_grid": "threadgroups_per_grid",
    "thread_position_in_threadgroup": "thread_position_in_threadgroup",
    "threads_per_threadgroup": "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup": "threads_per_threadgroup",
    "thread_position_in_grid": "thread_position_in_grid",
    "threads_per_grid": "threads_per_grid",
}
INDICES = {
    "thread_index_in_threadgroup": "thread_index_in_threadgroup",
    "thread_index_in_simdgroup": "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup": "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup": "simdgroups_per_threadgroup",
    "threads_per_simdgroup": "threads_per_simdgroup",
    "thread_execution_width": "threads_per_simdgroup",
}


@dataclass(frozen=True)
class Parameter:
    """kind: buffer, constant, threadgroup (index is a C++ expression), position or index (index is
    the field). condition: the function constant without which the argument is not there.
    """

    kind: str
    index: str
    name: str
    is_reference: bool = False
    condition: str = ""


@dataclass
class Kernel:
    """One kernel function or function template."""

    name: str
    parameters: list[Parameter]
    template_header: str = ""  # "template <...>", empty for a plain function
    max_threads: str = (
        ""  # expression of max_total_threads_per_threadgroup, may use template parameters
    )


@dataclass(frozen=True)
class Instance:
    """A name the host can ask for."""

    host_name: str
    function: str
    arguments: str  # "<...>" or empty


@dataclass
class Program:
    """Everything the tables need to know."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    instances: list[Instance] = field(default_factory=list)
    constants: list[tuple[str, str, str]] = field(default_factory=list)  # index, type, name


def attribute(tokens: list[Token], name: str) -> list[Token] | None:
    """Argument tokens of attribute `name(...)` anywhere in the tokens of one or more [[...]]; []
    without a list.
    """
    for position, token in enumerate(tokens):
        if token.kind == "name" and token.text == name:
            rest = tokens[position + 1 :]
            if rest and rest[0].text == "(":
                return rest[1 : matching(rest, 0)]
            return []
    return None


def strip_attributes(tokens: list[Token]) -> tuple[list[Token], list[Token]]:
    """(tokens outside [[...]], tokens inside)."""
    outside: list[Token] = []
    inside: list[Token] = []
    position = 0
    while position < len(tokens):
        if tokens[position].text == "[[":
            end = matching(tokens, position)
            inside += [*tokens[position + 1 : end], Token("symbol", ",")]
            position = end + 1
        else:
            outside.append(tokens[position])
            position += 1
    return outside, inside


def parse_parameter(tokens: list[Token], kernel: str) -> Parameter:
    declaration, attributes = strip_attributes(significant(tokens))
    name = declaration[-1].text
    texts = {token.text for token in declaration}
    for kind in ("buffer", "threadgroup"):
        index = attribute(attributes, kind)
        if index is not None:
            if kind == "buffer" and "constant" in texts:
                kind = "constant"
            condition = attribute(attributes, "function_constant")
            return Parameter(kind, join(index), name, "&" in texts, join(condition or []))
    for names, kind in ((POSITIONS, "position"), (INDICES, "index")):
        for token in attributes:
            if token.text in names:
                return Parameter(kind, names[token.text], name)
    raise TranslationError(
        f"kernel {kernel}: parameter '{name}' has no attribute the translator knows"
    )


def parse_kernel(
    name: str, parameters: list[Token], attributes: list[Token], template_header: str
) -> Kernel:
    parts = [part for part in split(parameters) if significant(part)]
    max_threads = attribute(attributes, "max_total_threads_per_threadgroup")
    return Kernel(
        name=name,
        parameters=[parse_parameter(part, name) for part in parts],
        template_header=template_header,
        max_threads=join(max_threads) if max_threads else "",
    )


def parse_instantiation(tokens: list[Token]) -> Instance | None:
    """`template [[host_name("n")]] [[kernel]] void f<...>(...)`, also with decltype(f<...>) f<...>;
    without the ';'.
    """
    declaration, attributes = strip_attributes(significant(tokens))
    literals = attribute(attributes, "host_name")
    if literals is None:
        return None
    host_name = "".join(token.text[1:-1] for token in literals if token.kind == "string")
    position = 0
    while position < len(declaration):
        text = declaration[position].text
        if text == "decltype":
            position = matching(declaration, position + 1) + 1
            continue
        following = declaration[position + 1].text if position + 1 < len(declaration) else ""
        if declaration[position].kind == "name" and following == "<":
            end = matching_angle(declaration, position + 1)
            spaced = " ".join(token.text for token in declaration[position + 1 : end + 1])
            return Instance(host_name, text, spaced)
        position += 1
    raise TranslationError(f"cannot read the instantiation {join(tokens)!r}")
