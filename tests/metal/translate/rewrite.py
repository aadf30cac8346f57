"""The token pass: MSL that clang cannot parse becomes C++ with the same lines.

* address-space qualifiers and [[...]] attributes go; `constant` becomes const;
* arrays declared `threadgroup` inside a kernel become references into the threadgroup's memory;
* `constant T x [[function_constant(n)]]` becomes a stateless object that asks the runtime;
* explicit instantiations with host_name go and are recorded;
* floatN(...) and vec<T, N>(...) become metal_sim::make<...>(...): clang vectors have no
  constructors.
"""

from __future__ import annotations

import re

from kernels import (
    Instance,
    Program,
    attribute,
    parse_instantiation,
    parse_kernel,
    strip_attributes,
)
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
)

_VECTOR = re.compile(r"(float|half|bfloat|int|uint|short|ushort|char|uchar|long|ulong|bool)[234]$")
_QUALIFIERS = ("device", "thread", "threadgroup", "kernel")


def symbol(text: str) -> Token:
    return Token("symbol", text)


class Rewriter:
    """One pass from left to right. `out` is the result, `program` what was found."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.out: list[Token] = []
        self.program = Program()
        self.position = 0
        self.scopes: list[str] = []  # "namespace", "kernel" (body of a kernel) or "block"
        self.next_scope = "block"  # kind of the next "{"
        self.template_header = ""
        self.attributes: list[Token] = []  # since the start of the declaration
        self.declaration_mark = -1  # where in `out` declarations_end() goes
        self.sites = 0

    def run(self) -> str:
        while self.position < len(self.tokens):
            self.step()
        return join(self.out)

    # -- helpers

    @property
    def at_file_scope(self) -> bool:
        return all(kind == "namespace" for kind in self.scopes)

    @property
    def in_kernel(self) -> bool:
        return "kernel" in self.scopes

    def previous(self) -> str:
        for token in reversed(self.out):
            if not token.is_blank:
                return token.text
        return ";"

    def at_statement(self) -> bool:
        return self.previous() in (";", "{", "}")

    def statement_end(self, start: int) -> int:
        """Index of the ';' that ends the statement at `start`."""
        position = start
        while self.tokens[position].text != ";":
            if self.tokens[position].text in ("(", "[", "[[", "{"):
                position = matching(self.tokens, position)
            position += 1
        return position

    def append_statement(self, text: str, replaced: list[Token]) -> None:
        """Text that ends in ';' in place of the tokens; the ';' stays a token, at_statement() looks
        for it.
        """
        self.out += [symbol(text.rstrip(" ;") + newlines(replaced)), symbol(";")]

    def copy(self) -> None:
        self.out.append(self.tokens[self.position])
        self.position += 1

    # -- the pass

    def step(self) -> None:
        token = self.tokens[self.position]
        if token.kind == "symbol":
            self.step_symbol(token.text)
        elif token.kind == "name":
            handler = getattr(self, f"on_{token.text}", None)
            if (handler is None or not handler()) and not self.on_vector():
                if token.text in _QUALIFIERS:
                    self.position += 1
                else:
                    self.copy()
        else:
            self.copy()

    def step_symbol(self, text: str) -> None:
        if text == "[[":
            end = matching(self.tokens, self.position)
            self.attributes += [*self.tokens[self.position + 1 : end], symbol(",")]
            self.out.append(Token("blank", newlines(self.tokens[self.position : end])))
            self.position = end + 1
            return
        if text == "{":
            self.open_scope()
        elif text == "}":
            self.close_scope()
        self.copy()
        if text == "{" and self.scopes[-1] == "kernel":
            self.declaration_mark = len(self.out)
        if text in (";", "}", "{") and self.at_file_scope:
            self.template_header = ""
            self.attributes = []

    def open_scope(self) -> None:
        self.scopes.append(self.next_scope)
        self.next_scope = "block"

    def close_scope(self) -> None:
        if not self.scopes:
            raise TranslationError("unbalanced '}'")
        if self.scopes.pop() == "kernel":
            self.out.insert(self.declaration_mark, symbol(self.end_of_declarations))

    # -- what the target language wants; the CUDA route overrides these

    end_of_declarations = " metal_sim::declarations_end();"

    def array_text(self, kind: str, name: str, dimensions: str, alignment: str) -> str:
        """A threadgroup array, as a declaration that ends in ';'."""
        self.sites += 1
        type_id = f"{kind} {dimensions}".strip()
        storage = f"metal_sim::threadgroup_array<{type_id}, {alignment}>"
        return f'{kind} (&{name}){dimensions} = {storage}({self.sites}u, "{name}");'

    def constant_text(self, kind: str, index: str, name: str) -> str:
        """A function constant, as a declaration that ends in ';'."""
        return f"static constexpr metal_sim::FunctionConstant<{kind}, {index}> {name}{{}};"

    def table_text(self) -> str:
        """What `constant` becomes in front of a table at file scope."""
        return "const"

    def vector_text(self, type_name: str) -> str:
        """What constructs a vector, in front of its argument list."""
        return f"metal_sim::make<{type_name}>"

    # -- names with a meaning of their own; each returns whether it consumed anything

    def on_namespace(self) -> bool:
        if self.at_file_scope and self.previous() != "using":
            self.next_scope = "namespace"
        return False

    def on_template(self) -> bool:
        if not self.at_file_scope:
            return False
        after = next_index(self.tokens, self.position)
        if self.tokens[after].text == "<":
            end = matching_angle(self.tokens, after)
            header = significant(self.tokens[self.position : end + 1])
            self.template_header = " ".join(token.text for token in header)
            for token in self.tokens[self.position : end + 1]:
                if token.text not in _QUALIFIERS:
                    self.out.append(token)
            self.position = end + 1
            return True
        end = self.statement_end(self.position)
        statement = self.tokens[self.position : end]
        instance = parse_instantiation(statement[1:])
        if instance is not None:
            self.program.instances.append(instance)
            self.out.append(Token("blank", newlines(statement)))
            self.position = end + 1
            self.template_header = ""
            self.attributes = []
            return True
        return False

    def on_kernel(self) -> bool:
        self.mark_kernel()
        return False

    def on_void(self) -> bool:
        if any(token.text == "kernel" for token in self.attributes):
            self.mark_kernel()
        return False

    def mark_kernel(self) -> None:
        """At `kernel` or the void of `[[kernel]] void`: records the kernel and its body's scope."""
        position = self.position
        while self.tokens[position].text != "(":
            position += 1
            if self.tokens[position].text == "[[":
                position = matching(self.tokens, position) + 1
        end = matching(self.tokens, position)
        name = significant(self.tokens[self.position : position])[-1].text
        _, inside = strip_attributes(self.tokens[self.position : position])
        parameters = self.tokens[position + 1 : end]
        if name in self.program.kernels:
            return
        kernel = parse_kernel(name, parameters, self.attributes + inside, self.template_header)
        self.program.kernels[name] = kernel
        self.next_scope = "kernel"
        if not self.template_header:
            self.program.instances.append(parse_plain(name, self.attributes + inside))

    def on_constant(self) -> bool:
        end = self.position
        while self.tokens[end].text not in (";", "(", ")", "{", ","):
            end = matching(self.tokens, end) + 1 if self.tokens[end].text == "[[" else end + 1
        declaration, attributes = strip_attributes(significant(self.tokens[self.position : end]))
        index = attribute(attributes, "function_constant")
        if index is None or not self.at_file_scope or self.tokens[end].text != ";":
            is_table = self.at_file_scope and self.at_statement()
            self.out.append(symbol(self.table_text() if is_table else "const"))
            self.position += 1
            return True
        kind = " ".join(token.text for token in declaration[1:-1])
        name = declaration[-1].text
        self.program.constants.append((join(index), kind, name))
        text = self.constant_text(kind, join(index), name)
        self.append_statement(text, self.tokens[self.position : end])
        self.position = end + 1
        return True

    def on_alignas(self) -> bool:
        after = matching(self.tokens, next_index(self.tokens, self.position))
        if self.tokens[next_index(self.tokens, after)].text == "threadgroup":
            return self.on_threadgroup()
        return False

    def on_threadgroup(self) -> bool:
        """A threadgroup array or variable in a kernel; qualifiers of pointers are left to the
        caller.
        """
        if not self.at_statement():
            return False
        end = self.statement_end(self.position)
        statement, _ = strip_attributes(significant(self.tokens[self.position : end]))
        alignment, statement = take_alignment(statement)
        first = first_declarator(statement)
        if first is None or any(token.text == "(" for token in statement[:first]):
            return False
        if not self.in_kernel:
            raise TranslationError(f"threadgroup '{statement[first].text}' outside a kernel")
        kind = " ".join(token.text for token in statement[:first])
        text = ""
        for part in split(statement[first:]):
            name, dimensions = part[0].text, join(part[1:])
            text += self.array_text(kind, name, dimensions, alignment) + " "
        self.append_statement(text, self.tokens[self.position : end])
        self.declaration_mark = len(self.out)
        self.position = end + 1
        return True

    def on_vector(self) -> bool:
        """float4(...) and vec<T, N>(...) where they construct a value."""
        if self.previous() in ("operator", ".", "->"):
            return False
        token = self.tokens[self.position]
        end = self.position
        if token.text == "vec":
            end = next_index(self.tokens, end)
            if end >= len(self.tokens) or self.tokens[end].text != "<":
                return False
            end = matching_angle(self.tokens, end)
        elif not _VECTOR.match(token.text):
            return False
        after = next_index(self.tokens, end)
        if after >= len(self.tokens) or self.tokens[after].text != "(":
            return False
        name = join(self.tokens[self.position : end + 1])
        self.out.append(symbol(self.vector_text(name)))
        self.position = end + 1
        return True


def parse_plain(name: str, attributes: list[Token]) -> Instance:
    """The instance of a kernel that is no template: its own name, or its host_name."""
    literals = attribute(significant(attributes), "host_name")
    host = "".join(t.text[1:-1] for t in literals if t.kind == "string") if literals else name
    return Instance(host, name, "")


def take_alignment(statement: list[Token]) -> tuple[str, list[Token]]:
    """Removes `alignas(n)` and `threadgroup`: (alignment expression or 1, rest)."""
    alignment = "1"
    rest: list[Token] = []
    position = 0
    while position < len(statement):
        text = statement[position].text
        if text == "alignas":
            end = matching(statement, position + 1)
            alignment = join(statement[position + 2 : end])
            position = end
        elif text not in _QUALIFIERS:
            rest.append(statement[position])
        position += 1
    return alignment, rest


def first_declarator(statement: list[Token]) -> int | None:
    """Index of the first declared name of `T a[n], b`; None for pointers, references and anything
    initialised.
    """
    position = 0
    while position < len(statement):
        text = statement[position].text
        if text in ("*", "&", "="):
            return None
        if text == "<":
            position = matching_angle(statement, position)
        following = statement[position + 1].text if position + 1 < len(statement) else ";"
        if statement[position].kind == "name" and position > 0 and following in ("[", ",", ";"):
            return position
        position += 1
    return None
