"""The config tree: what is wrong is named by its path, what is right survives the log."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config import Base, Config, SamplingConfig, checked, config_digest, decode_config, encode_config, load_config
from gyre.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("**/*.yaml"))


@pytest.mark.parametrize("text", ["5e-4", "5E-4", "0.0005", ".5e-3", "+5.0e-4"])
def test_a_number_may_be_written_in_any_way(text: str) -> None:
    assert load_config(f"trainer: {{learning_rate: {text}}}").trainer.learning_rate == 5e-4


def test_an_empty_file_is_the_defaults() -> None:
    assert load_config("") == Config()


def test_values_reach_their_places() -> None:
    config = load_config("seed: 7\npipeline: {groups_per_step: 3, lookahead: 1, steps_per_burst: 2}\n")
    assert (config.seed, config.pipeline.groups_per_step) == (7, 3)
    assert config.pipeline.dispatch_depth == 9
    assert config.trainer == Config().trainer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds: 1", "run.yaml: seeds: unknown key; did you mean seed?"),
        ("trainer: {lerning_rate: 1}", "run.yaml: trainer.lerning_rate: unknown key; did you mean learning_rate?"),
        ("pipeline: {qqqq: 1}", "run.yaml: pipeline.qqqq: unknown key; valid names: num_steps, "),
        ("trainer: 3", "run.yaml: trainer: expected a mapping, got int"),
        ("- 1", "run.yaml: top level: expected a mapping, got list"),
        ("trainer: {learning_rate: fast}", "run.yaml: trainer.learning_rate: Expected `float`, got `str`"),
        ("pipeline: {executions_per_group: 1}", "run.yaml: pipeline.executions_per_group: Expected `int` >= 2"),
        ("log: {sync: sometimes}", "run.yaml: log.sync: Invalid enum value 'sometimes'; choose one of always, default"),
        ("log: {num_replicas: 2}", "run.yaml: log.num_replicas: Invalid enum value 2; choose one of 1, 3, 5"),
        ("log: {url: 'http://h'}", "run.yaml: log: log.url: http://h is no address of a NATS server; write nats://"),
        ("log: {url: 'nats://a:1, mqtt://b'}", "run.yaml: log: log.url: mqtt://b is no address of a NATS server"),
        ("harness: {command: [1]}", "run.yaml: harness.command[0]: Expected `str`, got `int`"),
        (
            "harness: {tool_budgets: [{tol: a}]}",
            "run.yaml: harness.tool_budgets[0].tol: unknown key; did you mean tool?",
        ),
        ("harness: {sandbox: harbor}", "run.yaml: harness: sandbox is `harbor`, but harness.environment is empty"),
        ("a: [", "run.yaml: not YAML: "),
        ("seed: 1\npipeline: {num_steps: 1, num_steps: 2}", "run.yaml: not YAML: key num_steps is there twice in "),
        ("guards: {max_kl: .inf}", "run.yaml: not YAML: .inf is no finite number in "),
        ("trainer:", "run.yaml: trainer: Expected `object`, got `null`"),
    ],
)
def test_what_cannot_be_meant_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(text, "run.yaml")
    assert str(raised.value).startswith(message)


PRINTABLE = st.characters(min_codepoint=32, max_codepoint=126)
"""YAML refuses control characters."""


SOUND: dict[str, st.SearchStrategy[Any]] = {
    "environment": st.sampled_from(("daytona", "module:Class")),
    "url": st.sampled_from(("nats://h:4222", "tls://h")),
    "kv_store": st.sampled_from(("", "embedded", "kv.example:8650")),
    "redact": st.lists(st.sampled_from(("sk-[a-z]+", r"\bkey: .*$")), max_size=2).map(tuple),
    "elsewhere": st.just(0),
    "hosts": st.just(1),
    "rendezvous": st.just(()),
    "tensor_parallel": st.just(1),
}
"""Where not every value of the type will do."""


def trees(cls: type[Base]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(
        cls, **{name: SOUND[name] if name in SOUND else values(hints[name]) for name in cls.__struct_fields__}
    )


def values(hint: Any) -> st.SearchStrategy[Any]:
    if isinstance(hint, type) and issubclass(hint, Base):
        return trees(hint)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=2).map(tuple)
    base, bounds = (hint, None) if isinstance(hint, type) else (hint.__origin__, hint.__metadata__[0])
    low = 0 if bounds is None else max(b for b in (bounds.ge, bounds.gt, 0) if b is not None)
    if base is int:
        return st.integers(low, (bounds and bounds.le) or 10**9)
    if base is float:
        high = 1e9 if bounds is None or bounds.le is None else bounds.le
        return st.floats(low, high, exclude_min=bounds is not None and bounds.gt is not None)
    return st.booleans() if base is bool else st.text(PRINTABLE, max_size=8)


@given(trees(Config))
def test_a_config_survives_the_log(config: Config) -> None:
    text = encode_config(config)
    assert decode_config(text) == config
    assert load_config(text) == config  # JSON is YAML
    assert encode_config(decode_config(text)) == text


def test_what_a_command_put_together_and_what_another_gyre_wrote_is_named() -> None:
    with pytest.raises(ConfigError, match=r"gyre gateway: sampling\.top_p: Expected `float` > 0"):
        checked(Config(sampling=SamplingConfig(top_p=0)), "gyre gateway")
    with pytest.raises(ConfigError, match=r"config on the log: .*`nope`.*; use the gyre that wrote it"):
        decode_config('{"nope": 1}')


def test_patterns_and_urls_that_cannot_be_meant_are_named() -> None:
    with pytest.raises(ConfigError, match=r"gateway: gateway\.redact: '\[' is no regular expression"):
        load_config("gateway: {redact: ['[']}")
    with pytest.raises(ConfigError, match=r"log: log\.url: the config is recorded: leave user and password out"):
        load_config("log: {url: 'nats://me:secret@h:4222'}")


def test_the_digest_names_the_values() -> None:
    one, two = Config(), load_config("seed: 2")
    assert config_digest(one) == config_digest(load_config("seed: 1")) != config_digest(two)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert isinstance(load_config(path.read_text(), path.name), msgspec.Struct)
