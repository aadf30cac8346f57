"""Tokens of a preprocessed MSL program, and a cursor that skips blanks and matches brackets.

White space and line markers are tokens too, so that joining all texts gives the program back with
its lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PATTERN = re.compile(
    r"""(?P<marker>^[ \t]*\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*")
      | (?P<char>'(?:\\.|[^'\\\n])*')
      | (?P<name>[A-Za-z_]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<blank>\s+)
      | (?P<symbol>\[\[|\]\]|::|->|<<=|>>=|&&|\|\||[-+*/%&|^=!<>]=|.)""",
    re.MULTILINE | re.VERBOSE | re.DOTALL,
)
_OPENING = {"(": ")", "[": "]", "{": "}", "[[": "]]"}
_CLOSING = set(_OPENING.values())


class TranslationError(Exception):
    """The program uses a construct the translator does not know."""


@dataclass(frozen=True)
class Token:
    kind: str
    text: str

    @property
    def is_blank(self) -> bool:
        return self.kind in ("blank", "marker")


def tokenize(text: str) -> list[Token]:
    return [Token(m.lastgroup or "symbol", m.group()) for m in _PATTERN.finditer(text)]


def join(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def newlines(tokens: list[Token]) -> str:
    """As many line ends as the tokens hold: what removed text leaves behind."""
    return "\n" * join(tokens).count("\n")


def significant(tokens: list[Token]) -> list[Token]:
    return [token for token in tokens if not token.is_blank]


def next_index(tokens: list[Token], index: int) -> int:
    """Index of the next token after `index` that is not blank; len(tokens) at the end."""
    index += 1
    while index < len(tokens) and tokens[index].is_blank:
        index += 1
    return index


def matching(tokens: list[Token], index: int) -> int:
    """Index of the bracket that closes the one at `index`. `]]` closes two single brackets where it
    must.
    """
    stack: list[str] = []
    for position in range(index, len(tokens)):
        text = tokens[position].text
        if tokens[position].kind != "symbol":
            continue
        if text in _OPENING:
            stack.append(_OPENING[text])
        elif text in _CLOSING:
            if text == "]]" and stack[-1] == "]":
                stack.pop()
                text = "]"
            if stack.pop() != text:
                raise TranslationError(f"unbalanced {text!r}")
            if not stack:
                return position
    raise TranslationError(f"no end for {tokens[index].text!r}")


def matching_angle(tokens: list[Token], index: int) -> int:
    """Index of the `>` that closes the `<` at `index` (template argument lists: no shifts or
    comparisons inside).
    """
    depth = 0
    position = index
    while position < len(tokens):
        text = tokens[position].text
        if text in ("(", "[", "{"):
            position = matching(tokens, position)
        elif text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return position
        elif text in (";", "}"):
            break
        position += 1
    raise TranslationError("no end for '<'")


def split(tokens: list[Token], separator: str = ",") -> list[list[Token]]:
    """Split at separators outside all brackets, angle brackets included."""
    parts: list[list[Token]] = [[]]
    position = 0
    while position < len(tokens):
        token = tokens[position]
        end = position
        if token.text in _OPENING:
            end = matching(tokens, position)
        elif token.text == "<":
            try:
                end = matching_angle(tokens, position)
            except TranslationError:
                end = position
        if token.text == separator:
            parts.append([])
        else:
            parts[-1].extend(tokens[position : end + 1])
        position = end + 1
    return parts
