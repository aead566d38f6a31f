"""Shell. A policy on disk: a folder in Hugging Face format (config.json, safetensors, tokenizer files).

Invariant: a folder is whole or absent; it is written beside its place and moved there in one rename.
Direction: folder -> config and tensors (`load_policy`), or what can be known without them (`check_policy`: no torch);
tensors -> folder (`save_policy`, used by export).
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
from safetensors import SafetensorError, safe_open

from gyre.errors import MissingError, PolicyError
from gyre.events.types import DemonstrationsLearned
from gyre.workers.policy_shape import ARCHITECTURES, check_axes, read_shape

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DEMONSTRATIONS = "demonstrations.json"
"""What a warm start has learned from, as the events that a run records of it."""
# What a tokenizer and a generation default consist of, and where the weights come from: copied as they are.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    DEMONSTRATIONS,
)


def load_policy(path: str | Path) -> "tuple[dict[str, Any], dict[str, Tensor]]":
    """Read `config.json` and every tensor. Shapes are checked against the config.

    Raises MissingError for an absent folder or file, PolicyError for a torn or misshapen one.
    """
    path = Path(path)
    config, axes = load_config(path), read_axes(path)
    tensors = {name: reader.get_tensor(name) for reader in _weights(path, "pt") for name in reader.keys()}  # noqa: SIM118
    if _HEAD in tensors.keys() - axes.keys() and not tensors.pop(_HEAD).equal(tensors[_EMBEDDING]):
        raise PolicyError(f"{path}: {_HEAD} differs from {_EMBEDDING}, but the config ties them")
    return config, tensors


def read_axes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> axes of every tensor, from the headers of the files; those that the config describes.

    Raises as `load_policy`. Some tools write the head of a tied policy as well: it is left out.
    """
    path = Path(path)
    shape = read_shape(load_config(path), f"{path}/config.json")
    axes = {n: tuple(reader.get_slice(n).get_shape()) for reader in _weights(path, "np") for n in reader.keys()}  # noqa: SIM118
    if shape.tied:
        axes.pop(_HEAD, None)
    check_axes(shape, axes, str(path))
    return axes


def check_policy(path: str | Path) -> None:
    """What would be refused of a policy, as far as that shows without reading its weights. Raises as `load_policy`."""
    read_axes(path)
    load_demonstrations(path)


def load_demonstrations(path: str | Path) -> tuple[DemonstrationsLearned, ...]:
    """Stage by stage; none for a policy that no warm start has made. Raises PolicyError for a torn file."""
    file = Path(path) / DEMONSTRATIONS
    if not file.exists():
        return ()
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[DemonstrationsLearned, ...])
    except msgspec.DecodeError as error:
        raise PolicyError(f"{file}: torn ({error}); copy the policy again") from None


def load_config(path: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a policy folder."""
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        raise MissingError(f"{path}: no such policy folder; make one with `gyre policy init` or give another path")
    if not file.exists():
        raise MissingError(f"{file}: missing; a policy is a folder in Hugging Face format")
    try:
        config = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise PolicyError(f"{file}: torn or not JSON ({error}); copy the checkpoint again") from None
    if not isinstance(config, dict):
        raise PolicyError(f"{file}: is a {type(config).__name__}, expected an object")
    return config


def save_policy(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: "Mapping[str, Tensor]",
    tokenizer_files_from: str | Path | None = None,
) -> None:
    """Write a policy folder that Hugging Face and SGLang load. Replaces an older one; readers see one or the other.

    Raises PolicyError when the tensors are not those that the config describes.
    """
    from safetensors.torch import save_file

    path = Path(path)
    shape = read_shape(config)
    check_axes(shape, {name: tuple(t.shape) for name, t in tensors.items()}, f"{path}: tensors to save")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        if tokenizer_files_from is not None:
            for name in _TOKENIZER_FILES:
                if (Path(tokenizer_files_from) / name).exists():
                    shutil.copyfile(Path(tokenizer_files_from) / name, fresh / name)
        full = {"architectures": [ARCHITECTURES[shape.family]]} | dict(config)
        (fresh / "config.json").write_bytes(orjson.dumps(full, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
        whole = {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
        save_file(whole, fresh / _WEIGHTS, metadata={"format": "pt"})
        replace_folder(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def replace_folder(fresh: Path, path: Path) -> None:
    """Move a finished folder to its place: on disk first, then one rename; an older folder makes way."""
    for file in sorted(fresh.rglob("*")):
        if file.is_file():
            _sync(file)
    fresh.chmod(0o755)
    if path.exists():
        # A folder cannot be renamed over a full one: for an instant between the two renames there is none.
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
        path.replace(old / "was")
        fresh.replace(path)
        shutil.rmtree(old)
    else:
        fresh.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _weight_files(path: Path) -> list[str]:
    if (path / _INDEX).exists():
        try:
            return sorted(set(orjson.loads((path / _INDEX).read_bytes())["weight_map"].values()))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise PolicyError(f"{path}/{_INDEX}: torn ({error!r}); copy the checkpoint again") from None
    if not (path / _WEIGHTS).exists():
        raise MissingError(f"{path}/{_WEIGHTS}: missing; save the policy as safetensors in Hugging Face format")
    return [_WEIGHTS]


def _weights(path: Path, framework: str) -> Iterator[Any]:
    """The files of the weights, opened one after the other; an open one has been found whole."""
    for name in _weight_files(path):
        try:
            with safe_open(path / name, framework) as reader:
                yield reader
        except FileNotFoundError:
            raise PolicyError(f"{path}/{name}: listed in {_INDEX} but absent; copy the checkpoint again") from None
        except (SafetensorError, OSError) as error:
            raise PolicyError(f"{path}/{name}: torn or not safetensors ({error}); copy the checkpoint again") from None
