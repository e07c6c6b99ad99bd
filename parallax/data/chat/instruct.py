"""The embedded chats: questions about the functions of Python's standard library, answered by their docstrings.

    user        json.dumps(obj, *, skipkeys=False, ensure_ascii=True, ...)
    assistant   Serialize ``obj`` to a JSON formatted ``str``.

Every function and method in the source of the running Python's library, without its tests, whose docstring says something in
words: the signature is the question, the first paragraph the answer. The source is parsed, never imported. Several thousand
pairs, always in the same order; pairs that are equal are one. Another Python version has other pairs.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator

from parallax.data.chat.records import BadChat, Chat, to_chat
from parallax.data.corpus import Corpus, TextFile

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def standard_library_chats(corpus: Corpus) -> Iterator[tuple[TextFile, int, Chat]]:
    """Yield (file, line of the definition, chat) for the functions in the files of `corpus`."""
    seen: set[tuple[str, str]] = set()
    for file in corpus.files:
        for qualified, function in _functions(file):
            answer = _first_paragraph(function)
            question = f"{qualified}({ast.unparse(function.args)})"
            if function.returns is not None:
                question += f" -> {ast.unparse(function.returns)}"
            if not any(c.isalpha() for c in answer) or answer.startswith(">>>") or (question, answer) in seen:
                continue
            seen.add((question, answer))
            try:
                yield file, function.lineno, to_chat({"prompt": question, "completion": answer})
            except BadChat:
                continue  # a docstring that shows control characters


def _functions(file: TextFile) -> Iterator[tuple[str, Definition]]:
    """Yield (module.Class.name, definition) in the order of the source, without functions inside functions."""
    try:
        text = file.path.read_text(encoding="utf-8-sig")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # the library holds a few files that are no Python, or no UTF-8, on purpose
    module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    yield from _members(tree, module)


def _members(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Definition]]:
    for member in node.body:
        if isinstance(member, Definition):
            yield f"{prefix}.{member.name}", member
        elif isinstance(member, ast.ClassDef):
            yield from _members(member, f"{prefix}.{member.name}")


def _first_paragraph(function: Definition) -> str:
    docstring = inspect.cleandoc(ast.get_docstring(function, clean=False) or "")
    lines = re.split(r"\n\s*\n", docstring, maxsplit=1)[0].split("\n")
    return " ".join(line.strip() for line in lines).strip()
