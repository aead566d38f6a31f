"""Messages <-> tokens: continuing a history by appending gives what rendering it whole gives."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gyre.agents.checkpoint import load_renderer
from gyre.agents.reference_harness import TOOLS
from gyre.agents.renderer import Renderer
from gyre.agents.replies import Reply
from gyre.errors import HarnessError, PolicyError
from gyre.workers.tiny_policy import CHAT_TEMPLATE, init_policy

# As Qwen2.5 writes it: a system turn, tools in the prompt, arguments as an object.
QWEN_LIKE = """
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy(folder, 1, num_demonstrations=300)
    return folder


@pytest.fixture(scope="module")
def renderers(policy_dir: Path) -> list[Renderer]:
    tiny = load_renderer(policy_dir)
    return [tiny, Renderer(tiny.tokenizer, QWEN_LIKE)]


PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>") | st.just("\n"), max_size=30)
# A reply begins with visible text, as a well-formed one does.
SAID = PLAIN.map(str.strip)
CALL = st.builds(
    lambda name, command: {
        "id": "c",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps({"command": command}, ensure_ascii=False)},
    },
    st.sampled_from(["bash", "edit"]),
    PLAIN,
)
PROMPT = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["system", "user"]), PLAIN),
    min_size=1,
    max_size=3,
)
ASSISTANT = st.builds(
    lambda content, calls: {"role": "assistant", "content": content, "tool_calls": calls},
    SAID,
    st.lists(CALL, max_size=2),
)
REST = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["tool", "user"]), PLAIN),
    min_size=1,
    max_size=4,
)


def as_message(reply: Reply) -> dict[str, Any]:
    calls = [
        {"id": "c", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.tool_calls
    ]
    return {"role": "assistant", "content": reply.content, "tool_calls": calls}


def sampled_for(renderer: Renderer, prompt: list[Any], said: dict[str, Any]) -> list[int]:
    """The reply as the policy would sample it: the assistant's turn as rendered, up to its last token."""
    before = renderer.render(prompt, TOOLS)
    after = renderer.render([*prompt, said], TOOLS, False)
    assert after[: len(before)] == before
    end = len(after) - after[::-1].index(renderer.end_of_turn_id)
    return after[len(before) : end]


@settings(max_examples=150, deadline=None)
@given(prompt=PROMPT, said=ASSISTANT, rest=REST)
def test_prompt_reply_delta_is_the_whole(
    renderers: list[Renderer], prompt: list[Any], said: dict[str, Any], rest: list[Any]
) -> None:
    for renderer in renderers:
        reply = sampled_for(renderer, prompt, said)
        assert renderer.is_closed(reply)
        parsed = renderer.parse_reply(reply)
        assert parsed.ok
        assert as_message(parsed) == said
        whole = renderer.render([*prompt, as_message(parsed), *rest], TOOLS)
        assert renderer.render(prompt, TOOLS) + reply + renderer.render_delta(rest, closed=True) == whole
        assert renderer.render(prompt, TOOLS) + reply[:-1] + renderer.render_delta(rest, closed=False) == whole


@settings(max_examples=100, deadline=None)
@given(prompt=PROMPT, said=ASSISTANT, rest=REST)
def test_messages_end_where_their_prefix_ends(
    renderers: list[Renderer], prompt: list[Any], said: dict[str, Any], rest: list[Any]
) -> None:
    messages = [*prompt, said, *rest]
    for renderer in renderers:
        ids, ends = renderer.render_marked(messages, TOOLS)
        assert ids == renderer.render(messages, TOOLS)
        assert len(ends) == len(messages)
        assert list(ends) == sorted(ends)
        for count, end in enumerate(ends, 1):
            prefix = renderer.render(messages[:count], TOOLS, False)
            assert prefix[:end] == ids[:end]
            shares_turn = messages[count - 1]["role"] == "tool" and [
                m["role"] for m in messages[count : count + 1]
            ] == ["tool"]
            assert end == len(prefix) - (2 if shares_turn else 0)
        delta, delta_ends = renderer.render_delta_marked(rest, closed=True)
        assert delta == renderer.render_delta(rest, closed=True)
        start = len(ids) - len(delta)
        assert tuple(start + end for end in delta_ends) == ends[-len(rest) :]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 639), max_size=40))
def test_any_ids_are_a_reply(renderers: list[Renderer], ids: list[int]) -> None:
    reply = renderers[0].parse_reply(ids)
    for call in reply.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


def encode(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "bash", "arguments": {"command": "ls"}',
        '{"name": "bash", "arguments": "ls"}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        "[]",
        "ls",
        "[" * 100_000,
    ],
)
def test_a_malformed_tool_call_is_content(renderers: list[Renderer], body: str) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    assert renderers[0].parse_reply(encode(renderers[0], text + "<|im_end|>")) == Reply(
        content=text, reasoning="", tool_calls=(), ok=False
    )


def test_a_cut_tool_call_is_content(renderers: list[Renderer]) -> None:
    reply = renderers[0].parse_reply(encode(renderers[0], '<tool_call>\n{"name": "bash", "argu'))
    assert (reply.ok, reply.tool_calls) == (False, ())


def test_reasoning_is_apart_and_arguments_keep_their_text(renderers: list[Renderer]) -> None:
    text = '<think>\nhm\n</think>\n\nOk.\n<tool_call>\n{"name":"bash","arguments":{"command":  "ls"}}\n</tool_call>'
    reply = renderers[0].parse_reply(encode(renderers[0], text + "<|im_end|>"))
    assert (reply.reasoning, reply.content, reply.ok) == ("hm", "Ok.", True)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("bash", '{"command":  "ls"}')]


def test_the_tiny_prompt_is_short_and_its_frame_one_token(renderers: list[Renderer]) -> None:
    tiny = renderers[0]
    assert tiny.render([{"role": "user", "content": "x"}], TOOLS) == tiny.render([{"role": "user", "content": "x"}])
    assert len(encode(tiny, '\n{"name": "bash", "arguments": {"command": "')) == 1
    assert len(encode(tiny, " ledger.txt")) == 1
    for token in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        assert encode(tiny, token) == [tiny.tokenizer.token_to_id(token)]


def test_a_delta_costs_what_it_adds(renderers: list[Renderer]) -> None:
    delta = renderers[0].render_delta([{"role": "tool", "content": "rc=0"}], closed=True)
    assert len(delta) < 20


def test_content_parts_and_half_surrogates_are_rendered(renderers: list[Renderer]) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for renderer in renderers:
        joined = renderer.render([{"role": "user", "content": "ab"}])
        assert renderer.render([{"role": "user", "content": parts}]) == joined
        assert renderer.render([{"role": "user", "content": "\ud800"}]) == renderer.render(
            [{"role": "user", "content": "?"}]
        )


def test_templates_that_cannot_be_continued_are_refused(policy_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(policy_dir / "tokenizer.json"))
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    assert Renderer(tokenizer, plain).template.style == "written"
    other = plain.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    )
    with pytest.raises(PolicyError, match="cannot read the tool calls"):
        Renderer(tokenizer, other)
    with pytest.raises(PolicyError, match="does not end in"):
        Renderer(tokenizer, "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(PolicyError, match="reads no clock"):
        Renderer(tokenizer, "{{ strftime_now('%d') }}" + CHAT_TEMPLATE)
    with pytest.raises(PolicyError, match="must be a Jinja template"):
        Renderer(tokenizer, "{% for %}")
    with pytest.raises(PolicyError, match=r"no token <.eot.>"):
        Renderer(tokenizer, CHAT_TEMPLATE, end_of_turn="<|eot|>")
    with pytest.raises(PolicyError, match="missing"):
        load_renderer(tmp_path)


def test_a_template_that_refuses_messages_is_a_harness_error(policy_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(policy_dir / "tokenizer.json"))
    refusal = "{% if m.role == 'developer' %}{{ raise_exception('no such role') }}{% endif %}"
    strict = "{% for m in messages %}" + refusal + "{% endfor %}"
    renderer = Renderer(tokenizer, strict + CHAT_TEMPLATE)
    with pytest.raises(HarnessError, match="no such role"):
        renderer.render([{"role": "developer", "content": "x"}])
