"""Shell. Python of the user's own by its name: `module:function` or `file.py:function` -> what stands there.

Invariant: a name leads to one object or to an error that repeats the name and says for what it was given. Beside that
only the import path changes: modules of the current directory are found. Direction: name -> module -> object.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from gyre.errors import MissingError


def load_object(name: str, what: str) -> Any:
    """`what` says in errors what it was to be, as in `consumer`. Raises MissingError."""
    source, _, attribute = name.rpartition(":")
    module = _load_file(Path(source), name, what) if source.endswith(".py") else _load_module(source, name, what)
    if not hasattr(module, attribute):
        raise MissingError(f"{what} {name}: there is no {attribute} in {source}")
    return getattr(module, attribute)


def _load_file(path: Path, name: str, what: str) -> Any:
    label = f"gyre_user_{path.stem}"  # a file may be called as a module that is there already
    spec = importlib.util.spec_from_file_location(label, path)
    if not path.exists() or spec is None or spec.loader is None:
        raise MissingError(f"{what} {name}: no such file: {path}")
    module = sys.modules[label] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load_module(source: str, name: str, what: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(f"{error.name}.")):
            raise MissingError(f"{what} {name}: no module {error.name} here or on PYTHONPATH") from None
        raise
