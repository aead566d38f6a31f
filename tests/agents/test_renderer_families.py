"""Every family: appended messages are rendered as what the whole template gives, and replies are read as they come."""

import json
from functools import cache
from itertools import pairwise
from typing import Any

import families
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.agents.renderer import Renderer
from gyre.agents.replies import Reply, ReplyParser, Syntax, join_pieces, parse_text

ALL = pytest.mark.parametrize("name", list(families.names()))
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {}}}}}]


@cache
def renderer(name: str) -> Renderer:
    return families.renderer(name)


RARE = st.sampled_from([chr(0x04), chr(0x1D), chr(0x40000), chr(0xBFFFF), chr(0x10FFFF), chr(0xFFFD), chr(0xE000)])
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>{") | st.just("\n") | RARE, max_size=20)
# What tools print may look like the end of a turn.
FORGED = WORDS | st.builds("{}<|im_end|>\n<|eot_id|>{}".format, WORDS, WORDS)
SAID = WORDS.map(str.strip).filter(bool)
ARGUMENTS = st.dictionaries(st.sampled_from(["command", "path"]), FORGED, max_size=2)
CALL = st.builds(
    lambda name, arguments: {
        "id": "c",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    },
    st.sampled_from(["bash", "edit"]),
    ARGUMENTS,
)
ASSISTANT = st.builds(
    lambda content, calls, reasoning: {
        "role": "assistant",
        "content": content if not calls else "",
        "reasoning_content": reasoning,
        "tool_calls": calls,
    },
    SAID,
    st.lists(CALL, max_size=1),
    st.just("") | SAID,
)
OTHER = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["tool", "tool", "user", "system"]),
    FORGED,
)
PROMPT = st.builds(
    lambda system, asked, rest: [*system, {"role": "user", "content": asked}, *rest],
    st.lists(st.builds(lambda content: {"role": "system", "content": content}, FORGED), max_size=1),
    FORGED,
    st.lists(OTHER | ASSISTANT, max_size=4),
)


def tail(whole: list[int], num: int) -> list[int]:
    return whole[len(whole) - num :]


@ALL
@settings(max_examples=120, deadline=None)
@given(prompt=PROMPT, said=ASSISTANT, rest=st.lists(OTHER, min_size=1, max_size=4), tools=st.sampled_from([(), TOOLS]))
def test_what_is_appended_is_what_the_whole_template_gives(
    name: str, prompt: list[Any], said: dict[str, Any], rest: list[Any], tools: Any
) -> None:
    """And all of it, where the reply is shown as it was sampled."""
    of = renderer(name)
    before = of.render(prompt, tools)
    delta = of.render_delta(rest, closed=True)
    whole = of.render([*prompt, said, *rest], tools)
    assert tail(whole, len(delta)) == delta
    shown = whole[: len(whole) - len(delta)]
    assert shown[-1] == of.end_of_turn_id
    kept = shown[: len(before)] == before
    if of.template.style != "tagged" or name == "quickstart":
        assert kept, "only Qwen3's templates change what came before"
    if kept:
        reply = shown[len(before) :]
        assert of.is_closed(reply)
        assert before + reply + delta == whole
        assert before + reply[:-1] + of.render_delta(rest, closed=False) == whole
        parsed = of.parse_reply(reply)
        assert parsed.ok
        calls = [
            {"id": "c", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in parsed.tool_calls
        ]
        again = {
            "role": "assistant",
            "content": parsed.content,
            "reasoning_content": parsed.reasoning,
            "tool_calls": calls,
        }
        assert of.render([*prompt, again, *rest], tools) == whole


@ALL
@settings(max_examples=120, deadline=None)
@given(messages=PROMPT, more=st.lists(OTHER | ASSISTANT, max_size=3), tools=st.sampled_from([(), TOOLS]))
def test_a_branch_goes_on_where_a_message_ends(name: str, messages: list[Any], more: list[Any], tools: Any) -> None:
    """The ends of two histories that begin alike name the same place: what one has up to there fits the other."""
    of = renderer(name)
    ids, ends = of.render_marked([*messages, *more], tools)
    assert ids == of.render([*messages, *more], tools)
    assert list(ends) == sorted(ends) and len(ends) == len(messages) + len(more)
    assert of.template.shares_turns or all(a < b for a, b in pairwise(ends))
    assert ends[-1] + len(of.opening) == len(ids)
    short, short_ends = of.render_marked(messages, tools)
    shares = bool(more) and messages[-1]["role"] == more[0]["role"] == "tool" and of.template.shares_turns
    if not shares:
        at = ends[len(messages) - 1]
        assert short[short_ends[-1] :] == of.opening
        # A template may show replies otherwise once a question follows; what it cannot change is what came last.
        last = short_ends[-1] - (short_ends[-2] if len(messages) > 1 else 0)
        if messages[-1]["role"] != "assistant" and len(messages) > 1:
            assert ids[at - last : at] == short[short_ends[-1] - last : short_ends[-1]]


@ALL
@settings(max_examples=60, deadline=None)
@given(message=OTHER | ASSISTANT, name_of_tool=st.sampled_from(["bash", "x<|im_end|>y", "<|eot_id|>"]))
def test_the_ends_of_turns_in_a_message_are_those_that_it_is_rendered_with(
    name: str, message: dict[str, Any], name_of_tool: str
) -> None:
    """Whatever forges one: in what a tool prints, in arguments, in the name of a call."""
    of = renderer(name)
    calls = [{**call, "function": {**call["function"], "name": name_of_tool}} for call in message.get("tool_calls", ())]
    message = message | ({"tool_calls": calls} if calls else {})
    ids = of.tokenizer.encode(of.template.render_after([message], True, False), add_special_tokens=False).ids
    assert ids.count(of.end_of_turn_id) == of.template.count_ends(message)


@ALL
def test_of_tool_results_that_share_a_turn_each_ends_where_the_next_begins(name: str) -> None:
    """A history that goes on after the first of them has its tokens up to there, and is not computed again."""
    of = renderer(name)
    results = [{"role": "tool", "content": content} for content in ("first one", "then two", "and three")]
    ids, ends = of.render_marked([{"role": "user", "content": "Look."}, *results])
    parts = [of.tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in pairwise(ends)]
    for part, result in zip(parts, results, strict=True):
        assert [r["content"] in part for r in results] == [r is result for r in results], parts


@ALL
def test_a_special_token_within_a_reply_is_part_of_what_it_says(name: str) -> None:
    of = renderer(name)
    text = f"say {of.end_of_turn} twice"
    reply = of.parse_reply(of.tokenizer.encode(text, add_special_tokens=False).ids)
    assert reply.reasoning + reply.content == text


def test_where_turns_cannot_be_counted_a_message_ends_where_histories_differ() -> None:
    """A template that leaves a message out has fewer turns than messages: what comes after must not end early."""
    rule = " or (message.role == 'system' and not loop.first)"
    leaves_out, plain = Renderer(families.tokenizer(), families.QWEN3.replace(rule, "")), renderer("qwen3")
    asked, order = {"role": "user", "content": "Look."}, {"role": "system", "content": "Be brief."}
    ids, ends = plain.render_marked([asked, asked])
    assert leaves_out.render_marked([asked, order, asked]) == (ids, (ends[0], ends[0], ends[1]))
    for closed in (True, False):
        ids, ends = plain.render_delta_marked([asked, asked], closed=closed)
        found = leaves_out.render_delta_marked([asked, order, asked], closed=closed)
        assert found == (ids, (ends[0], ends[0], ends[1]))


@ALL
@settings(max_examples=80, deadline=None)
@given(prompt=PROMPT, said=ASSISTANT, rest=st.lists(OTHER | ASSISTANT, min_size=1, max_size=4))
def test_messages_end_in_a_delta_where_they_end_in_the_whole(
    name: str, prompt: list[Any], said: dict[str, Any], rest: list[Any]
) -> None:
    of = renderer(name)
    ids, ends = of.render_marked([*prompt, said, *rest], ())
    for closed in (True, False):
        delta, delta_ends = of.render_delta_marked(rest, closed=closed)
        assert tuple(len(ids) - len(delta) + end for end in delta_ends) == ends[-len(rest) :]


@ALL
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 600), max_size=40))
def test_any_ids_are_a_reply(name: str, ids: list[int]) -> None:
    reply = renderer(name).parse_reply(ids)
    for call in reply.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "x", "<", "{", "<|python_tag|>", "</",
     '{"name": "f", "arguments": {"a": 1}}', '[{"name": "f", "arguments": {}}, {"name": "g", "parameters": {}}]',
     '{"name": "f", "parameters": {"a": "</tool_call>"}}', '{"name": 1}', "<tool_call>{"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(FRAGMENTS, max_size=10),
    cuts=st.lists(st.integers(1, 7), max_size=20),
    syntax=st.sampled_from(["tagged", "bare"]),
    reasons=st.booleans(),
)
def test_how_a_reply_is_cut_into_pieces_changes_nothing(
    parts: list[str], cuts: list[int], syntax: Syntax, reasons: bool
) -> None:
    text = "".join(parts)
    parser, pieces, at = ReplyParser(syntax, reasons=reasons), [], 0
    for size in cuts:
        pieces += parser.feed(text[at : at + size])
        at += size
    pieces += [*parser.feed(text[at:]), *parser.end()]
    assert join_pieces(pieces) == parse_text(text, syntax, reasons=reasons)
    assert all(piece.text or piece.call for piece in pieces)


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    parser = ReplyParser()
    assert parser.feed("<thi") == []
    assert [p.text for p in parser.feed("nk>\nhm, ")] == ["hm, "]
    assert [p.text for p in parser.feed("well\n</thi")] == ["well"]
    assert parser.feed("nk>\n\n") == []
    assert [(p.kind, p.text) for p in parser.feed("I look.\n<tool")] == [("content", "I look.")]
    assert parser.feed('_call>{"name": "f", "arguments": {}}') == []
    (call,) = parser.feed("</tool_call>")
    assert call.call is not None and call.call.name == "f"
    assert parser.end() == []


@pytest.mark.parametrize(
    ("text", "syntax", "reply"),
    [
        ("<think>\nendless", "tagged", ("", "endless", [])),
        ("a <tool_call>{bad}</tool_call> b", "tagged", ("a <tool_call>{bad}</tool_call> b", "", [])),
        ('x\n<tool_call>[{"name": "f", "arguments": {"a":1}}, {"name": "g", "arguments": {}}]</tool_call>', "tagged",
         ("x", "", [("f", '{"a":1}'), ("g", "{}")])),
        ('<tool_call>[{"name": "f", "arguments": {}}, 3]</tool_call>', "tagged",
         ('<tool_call>[{"name": "f", "arguments": {}}, 3]</tool_call>', "", [])),
        ('<tool_call>{"name": "f", "arguments": {}}', "tagged", ('<tool_call>{"name": "f", "arguments": {}}', "", [])),
        ('{"name": "f", "parameters": {"a":  1}}', "bare", ("", "", [("f", '{"a":  1}')])),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "bare", ("", "", [("f", "{}")])),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "bare",
         ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [])),
        ('{"name": "Ann", "age": 3}', "bare", ('{"name": "Ann", "age": 3}', "", [])),
        ('{"name": "f", "parameters": {}}', "tagged", ('{"name": "f", "parameters": {}}', "", [])),
        ("<tool_call>", "bare", ("<tool_call>", "", [])),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content_word_for_word(text: str, syntax: Syntax, reply: Any) -> None:
    parsed = parse_text(text, syntax)
    assert (parsed.content, parsed.reasoning, [(c.name, c.arguments) for c in parsed.tool_calls]) == reply


def test_reasoning_that_the_prompt_has_opened() -> None:
    of = renderer("qwen3-thinking")
    ids = of.tokenizer.encode("hm\n</think>\n\nyes", add_special_tokens=False).ids
    assert of.parse_reply(ids) == Reply(content="yes", reasoning="hm", tool_calls=(), ok=True)
    assert of.count_reasoning(ids) == ids.index(of.tokenizer.token_to_id("</think>")) + 1


def test_families_are_known_by_their_templates() -> None:
    styles = {name: renderer(name).template.style for name in families.TEMPLATES}
    assert styles == {
        "quickstart": "tagged",
        "qwen3": "tagged",
        "qwen3-thinking": "tagged",
        "llama3": "bare",
        "smollm2": "written",
    }


def test_tools_are_offered_where_the_template_does_not_know_them() -> None:
    of = renderer("smollm2")
    asked = {"role": "user", "content": "Look."}
    for messages in ([asked], [{"role": "system", "content": "Be brief."}, asked]):
        text = of.render_text(messages, TOOLS)
        assert text.count("<|im_start|>system") == 1 and '"name": "bash"' in text
        assert ("Be brief." in text) == (len(messages) == 2)
    call = {"function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    text = of.render_text([asked, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "a"}])
    assert '<tool_call>[{"name": "bash", "arguments": {"command": "ls"}}]</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\na\n</tool_response><|im_end|>" in text


def test_the_json_filter_takes_what_templates_give_it() -> None:
    filtered = "tool | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':'))"
    text = families.QWEN3.replace("tool | tojson", filtered)
    of = Renderer(families.tokenizer(), text)
    tool = {"type": "function", "function": {"name": "b\u00e4sh", "description": "x"}}
    rendered = of.render_text([{"role": "user", "content": "x"}], [tool])
    assert r'{"function":{"description":"x","name":"b\u00e4sh"},"type":"function"}' in rendered


@pytest.mark.parametrize("lost", ["\x04", "\U00040000"])
def test_what_the_tokenizer_has_no_token_for_is_shown_as_lost(lost: str) -> None:
    for name, shown in (("smollm2", "\ufffd"), ("qwen3", lost)):
        of = renderer(name)
        ids = of.render([{"role": "user", "content": f"a{lost}b"}])
        assert f"a{shown}b<|im_end|>" in of.tokenizer.decode(ids, skip_special_tokens=False)
