"""The embedded chats: what is asked about the standard library, and answered."""

from __future__ import annotations

import ast
import importlib
import inspect
import json

from parallax.data.chat.instruct import standard_library_chats
from parallax.data.corpus import standard_library

CHATS = list(standard_library_chats(standard_library()))
ANSWERS = {chat.messages[0]["content"]: chat.messages[1]["content"] for _, _, chat in CHATS}


def test_there_are_thousands_of_different_pairs_in_the_same_order_each_time() -> None:
    assert len(CHATS) > 2000
    again = [chat for _, _, chat in standard_library_chats(standard_library())]
    assert again == [chat for _, _, chat in CHATS]
    assert len({json.dumps(chat.messages) for chat in again}) == len(again)


def test_the_signature_is_the_question_and_the_first_paragraph_the_answer() -> None:
    question = f"json.dumps{inspect.signature(json.dumps)}"
    assert ANSWERS[question] == " ".join((json.dumps.__doc__ or "").split("\n\n")[0].split())
    assert "textwrap.dedent(text)" in ANSWERS and "collections.Counter.most_common(self, n=None)" in ANSWERS


def test_answers_are_what_python_itself_says_of_its_functions() -> None:
    checked = 0
    for name in ("shlex", "statistics", "bisect", "textwrap", "fnmatch", "heapq"):
        module = importlib.import_module(name)
        for question, answer in ANSWERS.items():
            qualified, _, rest = question.partition("(")
            function = getattr(module, qualified.removeprefix(f"{name}."), None)
            if qualified.startswith(f"{name}.") and inspect.isfunction(function) and function.__module__ == name:
                assert " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split()) == " ".join(answer.split())
                names = [
                    argument.arg
                    for argument in ast.walk(ast.parse(f"def f({rest}: ..."))
                    if isinstance(argument, ast.arg)
                ]
                assert set(names) == set(inspect.signature(function).parameters)
                checked += 1
    assert checked > 20
