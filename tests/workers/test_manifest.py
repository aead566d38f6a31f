import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.errors import TransferError
from gyre.workers.manifest import TensorEntry, WeightManifest, check_manifest, tensor_digest, weights_digest

names = st.text("abc.", min_size=1, max_size=6)
arrays = st.dictionaries(names, st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=4), max_size=5)


def as_arrays(lists: dict[str, list[float]]) -> dict[str, np.ndarray]:
    return {name: np.array(values, dtype=np.float32) for name, values in lists.items()}


def manifest_of(named: dict[str, np.ndarray], **changes: object) -> WeightManifest:
    tensors = tuple(
        TensorEntry(
            name=name,
            dtype=array.dtype.name,
            shape=array.shape,
            address=64,
            num_bytes=array.nbytes,
            digest=tensor_digest(array.tobytes()),
        )
        for name, array in sorted(named.items())
    )
    fields = {"session": "h:1", "version": 3, "digest": weights_digest(named), "tensors": tensors} | changes
    return WeightManifest(**fields)  # type: ignore[arg-type]


@given(arrays)
def test_digest_ignores_order(lists: dict[str, list[float]]) -> None:
    named = as_arrays(lists)
    assert weights_digest(named) == weights_digest(dict(reversed(named.items())))


def test_digest_sees_name_dtype_shape_and_bytes() -> None:
    base = np.arange(6, dtype=np.float32)
    variants = [
        {"a": base},
        {"b": base},
        {"a": base.view(np.int32)},
        {"a": base.reshape(2, 3)},
        {"a": base + 1},
        {"a": base, "b": base},
    ]
    assert len({weights_digest(named) for named in variants}) == len(variants)


def test_digest_of_a_view_is_that_of_its_copy() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert weights_digest({"a": matrix.T}) == weights_digest({"a": matrix.T.copy()})


def test_manifest_that_covers_the_model_is_accepted() -> None:
    named = as_arrays({"a": [1, 2], "b": [3]})
    check_manifest(manifest_of(named), {"a": (2,), "b": (1,)})


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"a": (2,), "b": (1,), "c": (1,)}, "c is missing"),
        ({"a": (2,)}, "b is not in the model"),
        ({"a": (2,), "b": (2,)}, r"b has shape \[1\], the model has \[2\]"),
    ],
)
def test_manifest_of_another_model_is_refused(shapes: dict[str, tuple[int, ...]], reason: str) -> None:
    with pytest.raises(TransferError, match=reason):
        check_manifest(manifest_of(as_arrays({"a": [1, 2], "b": [3]})), shapes)


def test_manifest_with_a_wrong_whole_is_refused() -> None:
    with pytest.raises(TransferError, match="it says dead"):
        check_manifest(manifest_of(as_arrays({"a": [1]}), digest="dead"))
