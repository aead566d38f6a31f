import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gyre.errors import TransferError
from gyre.workers.manifest import weights_digest

torch = pytest.importorskip("torch")
pytest.importorskip("mooncake.engine")

from safetensors.torch import save_file  # noqa: E402
from weight_owner import Owner  # noqa: E402

from gyre.workers.transfer import TransferEndpoint, WeightSink, WeightSource, tensors_digest  # noqa: E402

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


@pytest.fixture(scope="module")
def sink() -> WeightSink:
    return WeightSink(TransferEndpoint())


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(37, 5, generator=generator),
        "layer.bias": torch.randn(5, generator=generator).to(torch.bfloat16),
        "steps": torch.arange(3),
        "scale": torch.tensor(2.5),
    }


def test_weights_cross_processes_and_follow_changes_in_place(owner: Owner, sink: WeightSink, tmp_path: Path) -> None:
    for version in (1, 2):
        weights = random_weights(version)
        save_file(weights, tmp_path / f"{version}.safetensors")
        manifest = owner.load(tmp_path / f"{version}.safetensors", version)
        assert manifest.version == version
        assert manifest.digest == tensors_digest(weights)
        pulled = sink.pull(manifest)
        assert pulled.keys() == weights.keys()
        for name, tensor in weights.items():
            assert pulled[name].dtype == tensor.dtype
            assert torch.equal(pulled[name], tensor), name


def test_a_tensor_that_changed_after_its_manifest_is_refused(owner: Owner, sink: WeightSink, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(random_weights(3), path)
    manifest = owner.load(path, 3)
    owner.ask("tear layer.weight")
    with pytest.raises(TransferError, match=r"layer\.weight arrived with checksum"):
        sink.pull(manifest)
    plain = tuple(msgspec.structs.replace(entry, checksum="") for entry in manifest.tensors)
    with pytest.raises(TransferError, match=r"layer\.weight arrived with digest"):
        sink.pull(msgspec.structs.replace(manifest, tensors=plain))
    assert torch.equal(sink.pull(owner.load(path, 3))["layer.weight"], random_weights(3)["layer.weight"])


def test_a_session_that_is_gone_is_a_transfer_error(sink: WeightSink, tmp_path: Path) -> None:
    gone = Owner()
    save_file(random_weights(4), tmp_path / "w.safetensors")
    manifest = gone.load(tmp_path / "w.safetensors", 4)
    gone.close()
    with pytest.raises(TransferError, match="failed with"):
        sink.pull(manifest)


def test_digest_agrees_with_numpy_and_tied_tensors_share_a_registration() -> None:
    shared = torch.randn(4, 4)
    named = {"embed": shared, "head": shared}
    source = WeightSource(named, TransferEndpoint())
    digest = source.manifest(1).digest
    source.close()
    assert digest == tensors_digest(named) == weights_digest({name: t.numpy() for name, t in named.items()})


def test_tensors_that_cannot_be_read_as_they_lie_are_refused() -> None:
    with pytest.raises(TransferError, match="not contiguous"):
        WeightSource({"a": torch.randn(3, 4).T}, TransferEndpoint())


def test_rate_of_64_megabytes(owner: Owner, tmp_path: Path) -> None:
    save_file({"big": torch.randn(16, 1 << 20)}, tmp_path / "big.safetensors")
    other = Owner()
    try:
        manifest = other.load(tmp_path / "big.safetensors", 1)
        sink = WeightSink(TransferEndpoint())
        for attempt in range(3):
            start = time.monotonic()
            sink.fetch(manifest)
            fetched = time.monotonic()
            sink.verify(manifest)
            verified = time.monotonic()
            megabytes = manifest.num_bytes / 1e6
            print(f"pull {attempt}: read {megabytes / (fetched - start):.0f} MB/s", end=", ")
            print(f"verify {megabytes / (verified - fetched):.0f} MB/s")
        assert manifest.num_bytes == 64 << 20
    finally:
        other.close()
