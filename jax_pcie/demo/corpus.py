"""Real sentences that every machine has: the docstrings of Python's standard library.

Reads source files with `ast` and imports none of them. Modules come in the order of
their names and docstrings in that of the file, so one Python gives one corpus.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from jax_pcie.demo.errors import DemoError

_MIN_WORDS = 6
# Variety: without a limit the first few modules would fill the batch.
_MAX_PER_MODULE = 4


def sentences(count: int) -> list[str]:
    """Returns `count` different sentences, at least six words each.

    Raises:
        DemoError: the standard library's sources do not have that many.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}  # a set that keeps its order
    for path in sorted(library.glob("*.py")):
        new = dict.fromkeys(s for s in _first_sentences(path) if s not in found)
        found.update(dict.fromkeys(list(new)[:_MAX_PER_MODULE]))
        if len(found) >= count:
            return list(found)[:count]
    raise DemoError(
        f"{count} sentences were asked for, the docstrings in {library} give only "
        f"{len(found)}"
    )


def _first_sentences(path: Path) -> Iterator[str]:
    """Yields the first sentence of each docstring, if it is long enough."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        docstring = inspect.cleandoc(ast.get_docstring(node) or "")
        paragraph = " ".join(docstring.partition("\n\n")[0].split())
        sentence = re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]
        if len(sentence.split()) >= _MIN_WORDS:
            yield sentence
