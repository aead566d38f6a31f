"""A policy folder: whole or absent, and a remedy in every refusal."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tiny_policies import tiny_config, tiny_tensors, write_tiny_policy  # noqa: E402

from gyre.errors import MissingError, PolicyError  # noqa: E402
from gyre.workers.policy_files import (  # noqa: E402
    check_policy,
    load_demonstrations,
    load_policy,
    read_axes,
    save_policy,
)

pytestmark = pytest.mark.stack


def test_saving_and_loading_keeps_config_bits_and_tokenizer(tmp_path: Path) -> None:
    config = tiny_config(dtype="bfloat16")
    tensors = {name: t.to(torch.bfloat16) for name, t in tiny_tensors(config).items()}
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    (tmp_path / "from" / "model.safetensors").write_text("not a tokenizer file")
    save_policy(tmp_path / "policy", config, tensors, tokenizer_files_from=tmp_path / "from")
    found_config, found = load_policy(tmp_path / "policy")
    assert found_config == config | {"architectures": ["LlamaForCausalLM"]}
    assert found.keys() == tensors.keys()
    assert all(found[n].dtype == torch.bfloat16 and torch.equal(found[n], tensors[n]) for n in tensors)
    assert (tmp_path / "policy" / "tokenizer.json").read_text() == "{}"


def test_saving_replaces_the_older_policy_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_tiny_policy(tmp_path / "policy")
    config = tiny_config(num_hidden_layers=1)
    save_policy(tmp_path / "policy", config, tiny_tensors(config))
    assert load_policy(tmp_path / "policy")[0]["num_hidden_layers"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]


def test_a_refused_save_leaves_the_older_policy(tmp_path: Path) -> None:
    path = write_tiny_policy(tmp_path / "policy")
    with pytest.raises(PolicyError, match=r"model.norm.weight is missing, expected shape \(64,\)"):
        save_policy(
            path, tiny_config(), {n: t for n, t in tiny_tensors(tiny_config()).items() if n != "model.norm.weight"}
        )
    assert load_policy(path)[1].keys() == tiny_tensors(tiny_config()).keys()
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]


def test_an_index_of_several_files_is_followed(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = write_tiny_policy(tmp_path / "policy")
    tensors = load_policy(path)[1]
    names = list(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, path / file)
    (path / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_policy(path)[1].keys() == tensors.keys()
    (path / "b.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"b.safetensors: listed in .* but absent"):
        load_policy(path)


def test_a_tied_head_of_its_own_must_be_the_same(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = write_tiny_policy(tmp_path / "policy")
    tensors = load_policy(path)[1]
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors")
    assert load_policy(path)[1].keys() == read_axes(path).keys() == tensors.keys()
    save_file(tensors | {"lm_head.weight": head + 1}, path / "model.safetensors")
    with pytest.raises(PolicyError, match="differs from model"):
        load_policy(path)


def test_what_is_missing_or_torn_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="gyre policy init"):
        load_policy(tmp_path / "nothing")
    path = write_tiny_policy(tmp_path / "policy")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PolicyError, match=r"model.safetensors: torn"):
        load_policy(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(MissingError, match=r"model.safetensors: missing"):
        load_policy(path)
    (path / "config.json").write_text('{"model_type": ')
    with pytest.raises(PolicyError, match=r"config.json: torn"):
        load_policy(path)
    assert load_demonstrations(path) == ()
    (path / "demonstrations.json").write_text('[{"stage": ')
    with pytest.raises(PolicyError, match=r"demonstrations.json: torn"):
        load_demonstrations(path)


def cut_short(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def of_another_shape(path: Path) -> None:
    (path / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=3)))


def of_another_kind(path: Path) -> None:
    (path / "config.json").write_text(json.dumps(tiny_config(model_type="gemma")))


FLAWS: dict[Callable[[Path], None], str] = {
    cut_short: r"model\.safetensors: torn",
    of_another_shape: r"model\.layers\.2\.self_attn\.q_proj\.weight is missing",
    of_another_kind: r"config\.json: model_type is 'gemma', expected one of llama",
    lambda path: (path / "model.safetensors").unlink(): r"model\.safetensors: missing",
    lambda path: (path / "config.json").unlink(): r"config\.json: missing",
    lambda path: (path / "demonstrations.json").write_text("[{"): r"demonstrations\.json: torn",
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_what_is_wrong_shows_without_reading_the_weights(flaw: Callable[[Path], None], tmp_path: Path) -> None:
    path = write_tiny_policy(tmp_path / "policy")
    check_policy(path)
    flaw(path)
    with pytest.raises((PolicyError, MissingError), match=FLAWS[flaw]):
        check_policy(path)


def test_the_check_does_without_torch(tmp_path: Path) -> None:
    path = write_tiny_policy(tmp_path / "policy", dtype="bfloat16")
    script = (
        "import sys; from gyre.workers.policy_files import check_policy; check_policy(sys.argv[1]); "
        "print('torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", script, str(path)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == "False"
