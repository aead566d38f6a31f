"""The mapping against transformers' own models: logits, round trips, and what a refusal says."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tiny_policies import tiny_config, tiny_tensors, write_tiny_policy  # noqa: E402

from gyre.errors import PolicyError  # noqa: E402
from gyre.workers import megatron  # noqa: E402
from gyre.workers.checkpoint_map import from_megatron, to_megatron  # noqa: E402
from gyre.workers.policy_files import load_policy  # noqa: E402
from gyre.workers.policy_shape import read_shape, tensor_shapes  # noqa: E402
from gyre.workers.sglang_cpu import define_torchvision_ops  # noqa: E402

pytestmark = pytest.mark.stack

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
POLICIES = {
    "llama-tied": {},
    "llama-untied": {"tie_word_embeddings": False},
    "llama-no-gqa": {"num_key_value_heads": 4},
    "llama-one-kv-head": {"num_key_value_heads": 1, "head_dim": 24},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 32768},
    "qwen2-bias": {"model_type": "qwen2"},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False, "rope_theta": 1000000.0},
    "qwen3-qk-norm": {"model_type": "qwen3", "head_dim": 24},
    "qwen3-untied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def auto_model():
    """transformers' loader of models."""
    define_torchvision_ops()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


@pytest.mark.parametrize("name", POLICIES)
def test_logits_are_those_of_transformers_both_ways(name: str, tmp_path: Path, auto_model) -> None:
    megatron.start_process_group(1, 2)
    path = write_tiny_policy(tmp_path / "policy", **POLICIES[name])
    theirs = auto_model.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.randint(0, 120, (3, 50), generator=torch.Generator().manual_seed(1))
    config, tensors = load_policy(path)
    shape = read_shape(config)
    model = megatron.build_model(shape)
    megatron.copy_weights(model, to_megatron(shape, tensors))
    with torch.no_grad():
        expected = theirs(ids).logits
        hidden = megatron.hidden_states(model, ids)
        found = megatron.logits_at(model, hidden.flatten(0, 1)).view(50, 3, -1).transpose(0, 1)
        assert expected.std() > 0.1
        assert (expected - found).abs().max() < 1e-5
        # The other way: change Megatron's weights, carry them over, compare again.
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        back = from_megatron(shape, dict(model.named_parameters()))
        assert not theirs.load_state_dict(back, strict=False).unexpected_keys
        theirs.tie_weights()
        hidden = megatron.hidden_states(model, ids)
        found = megatron.logits_at(model, hidden.flatten(0, 1)).view(50, 3, -1).transpose(0, 1)
        moved = theirs(ids).logits
        assert (moved - expected).abs().max() > 0.05
        assert (moved - found).abs().max() < 1e-5


@pytest.mark.parametrize("name", POLICIES)
def test_a_round_trip_keeps_every_bit(name: str) -> None:
    config = tiny_config(**POLICIES[name])
    shape, tensors = read_shape(config), tiny_tensors(config)
    back = from_megatron(shape, to_megatron(shape, tensors))
    assert list(back) == list(tensor_shapes(shape))
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_parameters_are_exactly_those_that_the_mapping_makes() -> None:
    megatron.start_process_group(1, 2)
    for changes in POLICIES.values():
        config = tiny_config(**changes)
        shape = read_shape(config)
        found = {name: tuple(p.shape) for name, p in megatron.build_model(shape).named_parameters()}
        assert found == {name: tuple(t.shape) for name, t in to_megatron(shape, tiny_tensors(config)).items()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters"),
        ({"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 2.0}}, "rope_parameters"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_a_config_that_would_not_be_computed_exactly_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        read_shape(tiny_config(**changes))


def test_a_config_without_its_sizes_is_refused() -> None:
    config = tiny_config()
    del config["hidden_size"]
    with pytest.raises(PolicyError, match="hidden_size is missing"):
        read_shape(config)


def test_a_wrong_tensor_is_named_with_both_shapes() -> None:
    config = tiny_config()
    shape, tensors = read_shape(config), tiny_tensors(config)
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(PolicyError, match=r"k_proj.weight is missing, expected shape \(32, 64\)"):
        to_megatron(shape, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(PolicyError, match=r"k_proj.weight has shape \(16, 64\), expected \(32, 64\)"):
        to_megatron(shape, tensors | {name: tensors[name][:16]})
    with pytest.raises(PolicyError, match=r"k_proj.bias has shape \(32,\), expected no such tensor"):
        to_megatron(shape, tensors | {"model.layers.0.self_attn.k_proj.bias": torch.zeros(32)})
