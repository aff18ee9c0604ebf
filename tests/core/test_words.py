"""Words belong to the faces: what decides has numbers and enums, and no sentence."""

import ast
from pathlib import Path

import pytest

from holdfast import core
from holdfast.core.messages import Cause, Did, Exited, Note
from holdfast.diagnose.narrator import Record
from holdfast.loader.loader_narrator import LoaderNarrator
from holdfast.policy import Policy


def told(tree):
    """The texts that may stand in core/: docstrings, types, and what an assertion says to an engineer."""
    for node in ast.walk(tree):
        for type_ in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            yield from ast.walk(type_) if type_ is not None else ()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield from ast.walk(node.msg)


@pytest.mark.parametrize("path", sorted(Path(core.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_no_sentence_in_core(path):
    tree = ast.parse(path.read_text())
    allowed = set(map(id, told(tree)))
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text.value for text in texts if " " in text.value and id(text) not in allowed]


@pytest.mark.parametrize("did", Did)
def test_a_loader_has_words_for_all_that_the_ledger_does(did):
    narrator = LoaderNarrator(Record(), Policy(), None, "fork", lambda *_: (None, None), lambda _: None)
    words = narrator.did(Note(Exited(0, 1, 1.0, Cause.SIGNAL, 9, None), did, 0, 0, at_work=3))
    assert words and "{" not in words
