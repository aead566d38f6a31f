"""The tiny policy: the same from the same seed, whole or absent, and what other programs load."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gyre.agents.checkpoint import load_renderer
from gyre.agents.reference_harness import TOOLS
from gyre.agents.tasks import EXTENSIONS, STEMS, WORDS
from gyre.errors import PolicyError
from gyre.workers.demonstrations import make_demonstration, make_messages
from gyre.workers.tiny_policy import SHAPES, TinyShape, init_policy, policy_digest


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy(folder, 1)
    return folder


def test_same_seed_same_bytes_in_another_process(policy_dir: Path, tmp_path: Path) -> None:
    script = "import sys; from gyre.workers.tiny_policy import init_policy; print(init_policy(sys.argv[1], 1))"
    argv = [sys.executable, "-c", script, str(tmp_path / "again")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == policy_digest(policy_dir)
    assert init_policy(tmp_path / "other", 2) != policy_digest(policy_dir)


def test_names_and_words_are_single_tokens(policy_dir: Path) -> None:
    tokenizer = load_renderer(policy_dir).tokenizer
    names = [f"{stem}.{extension}" for stem in STEMS for extension in EXTENSIONS]
    for text in (*names, *WORDS):
        assert len(tokenizer.encode(text).ids) == 1, text
        assert len(tokenizer.encode(f" {text}").ids) == 1, text
    vocab = json.loads((policy_dir / "config.json").read_text())["vocab_size"]
    assert vocab - 8 <= tokenizer.get_vocab_size() <= vocab, "an id without a token could be sampled"


def test_the_directory_is_whole_or_absent(policy_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="exists already"):
        init_policy(policy_dir, 1)
    with pytest.raises(MemoryError):
        init_policy(tmp_path / "huge", 1, num_demonstrations=10, shape=TinyShape(hidden=10**12))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PolicyError, match="no policy there"):
        policy_digest(tmp_path / "huge")


def test_tokenizing_needs_neither_torch_nor_transformers(policy_dir: Path) -> None:
    script = (
        "import sys; from gyre.agents.checkpoint import load_renderer; load_renderer(sys.argv[1]); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    argv = [sys.executable, "-c", script, str(policy_dir)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.stack
def test_transformers_gives_the_same_ids(policy_dir: Path) -> None:
    from gyre.workers.sglang_cpu import define_torchvision_ops

    define_torchvision_ops()
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(policy_dir)
    ours = load_renderer(policy_dir)
    for index in range(50):
        messages = make_messages(make_demonstration("files", 5, index, 3, 0.5))
        for count in range(1, len(messages) + 1):
            expected = theirs.apply_chat_template(
                messages[:count], tools=TOOLS, add_generation_prompt=True, return_dict=False
            )
            assert ours.render(messages[:count], TOOLS) == expected
    assert theirs.eos_token_id == ours.end_of_turn_id
    assert theirs.decode([ours.tokenizer.token_to_id("<tool_call>")], skip_special_tokens=True) == "<tool_call>"


@pytest.mark.stack
def test_transformers_loads_the_weights_as_they_are(policy_dir: Path) -> None:
    from gyre.workers.sglang_cpu import define_torchvision_ops

    define_torchvision_ops()
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy_dir)
    assert (type(model).__name__, model.dtype) == ("LlamaForCausalLM", torch.float32)
    assert model.generation_config.eos_token_id == load_renderer(policy_dir).end_of_turn_id
    state = model.state_dict()
    weights = load_file(policy_dir / "model.safetensors")
    assert state.keys() - weights.keys() <= {"lm_head.weight"}
    for name, weight in weights.items():
        assert np.array_equal(state[name].numpy(), weight), name
    assert 1.0e6 < sum(weight.size for weight in weights.values()) < 1.2e6


@pytest.mark.parametrize(("size", "low", "high"), [("tiny", 1.05e6, 1.15e6), ("small", 2.55e6, 2.65e6)])
def test_a_size_is_what_its_help_says(size: str, low: float, high: float, tmp_path: Path) -> None:
    init_policy(tmp_path / "policy", 1, num_demonstrations=50, shape=SHAPES[size])
    assert low < sum(tensor.size for tensor in load_file(tmp_path / "policy/model.safetensors").values()) < high
