"""`check.py FILE.metal [--append LINE]`: are all pointers and references of a shader in the right
address space?

The simulated device drops address spaces, Metal's compiler does not. Clang's C++ for OpenCL has the
same four under other names, so its front end finds a device pointer where a threadgroup one is
wanted. Two passes, because OpenCL copies no class object out of the constant address space, and
Metal does: in each pass two of the spaces share one OpenCL space, in the other pass these two
differ. Pointers without any address space, which Metal refuses and OpenCL takes for generic ones,
are found by a token search.

Does not check the rest of the language: that is the translator's compiler.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "translate"))

from build_kernel import find_clang
from kernels import attribute, strip_attributes
from preprocess import preprocess
from rewrite import first_declarator, take_alignment
from tokens import (
    Token,
    TranslationError,
    join,
    matching,
    matching_angle,
    newlines,
    next_index,
    significant,
    split,
    tokenize,
)

HERE = Path(__file__).resolve().parent
SPACES = ("device", "threadgroup", "constant", "thread")
PASSES = (
    {"device": "__global", "constant": "__global const", "threadgroup": "__local"},
    {"device": "__local", "constant": "__global const", "threadgroup": "__global"},
)
FLAGS = ["-x", "clcpp", "-cl-std=clc++2021", "--target=spir64", "-fsyntax-only", "-cl-no-stdinc"]
FLAGS += ["-ferror-limit=0", "-Wno-everything"]
BUILTIN = re.compile(
    r"(void|bool|float|half|bfloat|u?int|u?short|u?char|u?long|size_t)[234]?$|simdgroup_\w+8x8$"
)
# Names that mean something in OpenCL and nothing in Metal.
RESERVED = ("local", "global", "private", "generic", "pipe", "event_t", "sampler_t", "uniform")
VECTOR = re.compile(r"(float|half|u?int|u?short|u?char|u?long)[234]$")


def symbol(text: str) -> Token:
    return Token("symbol", text)


def declared_types(tokens: list[Token]) -> set[str]:
    """Names after struct, class, typename: types of the program and template parameters."""
    plain = significant(tokens)
    keywords = ("struct", "class", "typename")
    return {b.text for a, b in pairwise(plain) if a.text in keywords}


def unqualified(tokens: list[Token]) -> list[str]:
    """Messages for declarators like `float* p` without an address space."""
    types = declared_types(tokens)
    messages = []
    file, line = "?", 1
    statement: set[str] = set()  # texts since the last ; , ( { }
    for index, token in enumerate(tokens):
        if token.kind == "marker":
            match = re.match(r'\s*#\s*(?:line\s+)?(\d+)\s+"([^"]*)"', token.text)
            if match:
                line, file = int(match.group(1)) - 1, match.group(2)
        line += token.text.count("\n")
        if token.text in (";", ",", "(", "{", "}"):
            statement = set()
        if token.kind == "name":
            statement.add(token.text)
        if token.text not in ("*", "&") or index == 0:
            continue
        before = [t for t in tokens[max(0, index - 4) : index] if not t.is_blank]
        after = (
            tokens[next_index(tokens, index)]
            if next_index(tokens, index) < len(tokens)
            else symbol(";")
        )
        is_type = bool(before) and (BUILTIN.match(before[-1].text) or before[-1].text in types)
        if is_type and after.kind == "name" and not statement & set(SPACES):
            declarator = f"{before[-1].text}{token.text} {after.text}"
            messages.append(f"{file}:{line}: error: '{declarator}' has no address space")
    return messages


def threadgroup_declaration(statement: list[Token]) -> str | None:
    """OpenCL forbids such arrays outside kernels, and templates are no kernels: a reference of that
    type.
    """
    _, rest = take_alignment(strip_attributes(significant(statement))[0])
    first = first_declarator(rest)
    if first is None:
        return None
    kind = " ".join(token.text for token in rest[:first])
    text = ""
    for part in split(rest[first:]):
        name, dimensions = part[0].text, join(part[1:])
        text += (
            f"threadgroup {kind} (&{name}){dimensions} = *(threadgroup {kind} (*){dimensions})0; "
        )
    return text


def prepare(tokens: list[Token]) -> str:
    """What clang's OpenCL front end can parse, with the same lines and all address spaces."""
    out: list[Token] = []
    position, depth = 0, 0
    while position < len(tokens):
        token = tokens[position]
        previous = next((t.text for t in reversed(out) if not t.is_blank), ";")
        end = position
        if token.text == "[[":
            end = matching(tokens, position)
            out.append(Token("blank", newlines(tokens[position : end + 1])))
        elif token.text in ("threadgroup", "alignas") and depth > 0 and previous[-1] in ";{}":
            end = next(i for i in range(position, len(tokens)) if tokens[i].text == ";")
            text = threadgroup_declaration(tokens[position:end])
            if text is None:
                end = position
                out.append(token)
            else:
                out += [symbol(text.rstrip("; ") + newlines(tokens[position:end])), symbol(";")]
        elif (
            token.text == "constant"
            and depth == 0
            and (text := function_constant(tokens, position))
        ):
            end = next(i for i in range(position, len(tokens)) if tokens[i].text == ";")
            out.append(symbol(text + newlines(tokens[position:end])))
        elif vector := vector_constructor(tokens, position):
            end = vector
            out.append(symbol(f"({join(tokens[position : end + 1])})"))
        elif token.text in RESERVED:
            out.append(symbol(token.text + "_"))
        elif token.text != "kernel":
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            out.append(token)
        position = end + 1
    return join(out)


def function_constant(tokens: list[Token], position: int) -> str | None:
    """At `constant`: the declaration of a function constant, or None for anything else, an argument
    that depends on one included.
    """
    end = position
    while tokens[end].text not in (";", "{", "(", ")", ","):
        end = matching(tokens, end) + 1 if tokens[end].text == "[[" else end + 1
    if tokens[end].text != ";":
        return None
    declaration, inside = strip_attributes(significant(tokens[position:end]))
    if attribute(inside, "function_constant") is None:
        return None
    return f"static __constant {' '.join(token.text for token in declaration[1:])} = 0;"


def vector_constructor(tokens: list[Token], position: int) -> int | None:
    """Index of the last token of a vector type that is followed by '(': a constructor, in OpenCL a
    cast.
    """
    end = position
    if tokens[position].text == "vec" and tokens[next_index(tokens, position)].text == "<":
        end = matching_angle(tokens, next_index(tokens, position))
    elif not VECTOR.match(tokens[position].text):
        return None
    after = next_index(tokens, end)
    return end if after < len(tokens) and tokens[after].text == "(" else None


def check(source: str, file_name: str, includes: list[str], clang: list[str]) -> list[str]:
    """Error messages with .metal lines; empty when all address spaces agree."""
    tokens = tokenize(preprocess(source, file_name, clang, includes, []))
    messages = unqualified(tokens)
    body = prepare(tokens)
    for spaces in PASSES:
        defines = [f"-D{name}={text}" for name, text in {**spaces, "thread": "__private"}.items()]
        text = f'#include "msl_declarations.h"\n{body}'
        command = [*clang, *FLAGS, *defines, f"-I{HERE}", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        errors = [line for line in done.stderr.splitlines() if "error:" in line]
        if done.returncode != 0 and not errors:
            errors = done.stderr.splitlines()
        messages += [error for error in errors if error not in messages]
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--append", default="", help="instantiation lines: templates are checked when instantiated"
    )
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--clang", default="")
    options = parser.parse_args()
    source = f'{options.file.read_text()}\n#line 1 "instantiations"\n{options.append}\n'
    includes = [str(options.file.parent), *options.include]
    try:
        messages = check(source, options.file.name, includes, find_clang(options.clang))
    except TranslationError as error:
        messages = [str(error)]
    print("\n".join(messages), end="\n" if messages else "")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
