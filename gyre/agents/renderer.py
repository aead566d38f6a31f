"""Pure. Messages <-> tokens of one policy, through its chat template and tokenizer (both are arguments).

messages -> ids (`render`), messages after a sampled reply -> the ids that follow it (`render_delta`), ids ->
messages (`parse_reply`). Invariant: for a well-formed reply to a rendered prompt,
`render(all) == render(prompt) + reply + render_delta(rest)`, so a token history is continued by appending and
never by rendering it again. Where a template drops something of older replies (Qwen3: their reasoning), the history
keeps what was sampled, and what follows it is still what the template gives. It rests on one shape, checked when a
renderer is made: every turn ends in a special token, at which the tokenizer always splits.

Messages are those of chat/completions, as mappings. Text that looks like a special token is encoded as
one, as `apply_chat_template` does; what a tool prints can therefore forge the look of a turn, but not its
place in the history. A character that the tokenizer has no tokens for is shown as U+FFFD: it would be dropped in
silence, or half of it, and what a reply says could not be told from its tokens.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Encoding, Tokenizer, decoders

from gyre.agents.replies import Reply, parse_text
from gyre.agents.template import Message, Template, Tool
from gyre.errors import HarnessError, PolicyError

_THINK = "<think>"
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that byte-level tokenizers name by the character of the same number; all others, in order, from 256 on."""


class Renderer:
    """Raises PolicyError for a template that cannot be continued, or whose tool calls gyre cannot read."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str,
        *,
        end_of_turn: str = "<|im_end|>",
        special_tokens: Mapping[str, str] | None = None,
        source: str = "policy",
    ) -> None:
        self.tokenizer = tokenizer
        self._lost = _lost_bytes(tokenizer)
        self.end_of_turn = end_of_turn
        end_id = tokenizer.token_to_id(end_of_turn)
        if end_id is None:
            raise PolicyError(f"{source}: the tokenizer has no token {end_of_turn}: set eos_token to the end of a turn")
        self.end_of_turn_id: int = end_id
        self.template = Template(
            chat_template, end_of_turn=end_of_turn, special_tokens=special_tokens or {}, source=source
        )
        self._separator = self._encode(self.template.separator)
        user: Message = {"role": "user", "content": "hi"}
        self.opening: list[int] = self.render([user])[len(self.render([user], add_generation_prompt=False)) :]
        """Ids that open the assistant's turn."""
        self._reasons = self._decode(self.opening).rstrip().endswith(_THINK)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a whole history; with `add_generation_prompt` the opening of the assistant's turn is added."""
        return self._encode(self.template.render(messages, tools, add_generation_prompt))

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> str:
        """Raises HarnessError when the template refuses the messages (roles out of order, say)."""
        return self.template.render(messages, tools, add_generation_prompt)

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[list[int], tuple[int, ...]]:
        """(ids, ends): the prompt with the opening of the reply, and how many of its ids each message ends at.

        A tool message ends before the end of its turn when another tool message shares that turn. One pass over the
        text, and one over that of each shared turn for each of its messages.
        """
        text = self.template.render(messages, tools, True)
        ids = self._encode(text)
        ends = self._count_back(ids, messages, self._count_leading(messages, tools))
        if ends is None:
            prefixes = (self._prefix(messages[:count], tools) for count in range(1, len(messages) + 1))
            ends = self._compare(text, prefixes)
        return ids, ends

    def render_delta(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Ids that follow a sampled reply: what ends its turn, `messages`, and the opening of the next reply.

        `closed` says that the reply's last id is the end of its turn; a reply that was cut lacks it. The cost
        is that of `messages` alone: they are rendered after a fixed base of two short turns.
        """
        return self._encode(self.template.render_after(messages, closed, True))

    def render_delta_marked(self, messages: Sequence[Message], *, closed: bool) -> tuple[list[int], tuple[int, ...]]:
        """`render_delta`, and how many of its ids each message ends at, as in `render_marked`."""
        text = self.template.render_after(messages, closed, True)
        ids = self._encode(text)
        ends = self._count_back(ids, messages, 0 if closed else 1)
        if ends is None:
            counts = range(1, len(messages) + 1)
            ends = self._compare(text, (self.template.render_after(messages[:n], closed, False) for n in counts))
        return ids, ends

    def _count_leading(self, messages: Sequence[Message], tools: Sequence[Tool]) -> int:
        """Ends of turns before the first message's: the template's own system turn. -1 when it cannot be told."""
        first = next((n for n, message in enumerate(messages, 1) if message["role"] != "system"), len(messages))
        head = messages[:first]
        text = self._prefix(head, tools)
        return text.count(self.end_of_turn) - sum(map(self.template.count_ends, head)) if text else -1

    def _prefix(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Empty when the template takes these messages only with others after them."""
        try:
            return self.template.render(messages, tools, False)
        except HarnessError:
            return ""

    def _count_back(self, ids: list[int], messages: Sequence[Message], leading: int) -> tuple[int, ...] | None:
        """The ends of all messages, by counting ends of turns from the last; None when their number is not right.

        Not by comparing with shorter histories: a template may show a reply otherwise once more messages follow.
        """
        closes = [at for at, token in enumerate(ids, 1) if token == self.end_of_turn_id]
        ends = [0] * len(messages)
        shared: list[int] = []
        for index in range(len(messages) - 1, -1, -1):
            num = self.template.count_ends(messages[index])
            if self._shares_turn(messages, index):
                num -= 1
                shared.append(index)
            elif closes:
                ends[index] = self._skip_separator(ids, closes[-1])
            if num > len(closes):
                return None
            del closes[len(closes) - num :]
        if len(closes) != leading:
            return None
        for index in reversed(shared):
            self._end_within_turn(ids, messages, index, ends)
        return tuple(ends)

    def _shares_turn(self, messages: Sequence[Message], index: int) -> bool:
        """Whether a message ends before its turn does."""
        pair = messages[index : index + 2]
        return self.template.shares_turns and len(pair) == 2 and all(m["role"] == "tool" for m in pair)

    def _skip_separator(self, ids: list[int], end: int) -> int:
        num = len(self._separator)
        return end + num if ids[end : end + num] == self._separator else end

    def _end_within_turn(self, ids: list[int], messages: Sequence[Message], index: int, ends: list[int]) -> None:
        """Sets `ends[index]`, of a tool message, from the end of its turn, which is known."""
        first = index
        while first and messages[first - 1]["role"] == "tool":
            first -= 1
        last = index + 1
        while self._shares_turn(messages, last):
            last += 1
        turn = self._turn_text(messages[first : last + 1])
        encoding = self._encoding(turn)
        start = ends[last] - len(encoding.ids)
        before = ends[index - 1] if index else 0
        if start < 0 or ids[start : ends[last]] != encoding.ids:
            ends[index] = before
            return
        common = _num_common(self._turn_text(messages[first : index + 1]), turn)
        ends[index] = max(before, start + bisect_right([end for _, end in encoding.offsets], common))

    def _turn_text(self, messages: Sequence[Message]) -> str:
        return self.template.render_after(messages, True, False).removeprefix(self.template.separator)

    def _compare(self, text: str, prefixes: Iterable[str]) -> tuple[int, ...]:
        """The number of ids that each prefix shares with `text`: for what cannot be counted."""
        encoding = self._encoding(text)
        token_ends = [end for _, end in encoding.offsets]
        ends = [0]
        for prefix in prefixes:
            ends.append(max(ends[-1], bisect_right(token_ends, _num_common(prefix, text))))
        return tuple(ends[1:])

    def is_closed(self, reply: Sequence[int]) -> bool:
        return bool(reply) and reply[-1] == self.end_of_turn_id

    def parse_reply(self, ids: Sequence[int]) -> Reply:
        """Never raises: what is not a well-formed tool call is content."""
        text = self._decode(ids[:-1] if self.is_closed(ids) else ids)
        return parse_text(text, self.template.syntax, reasons=self._reasons)

    def count_reasoning(self, ids: Sequence[int]) -> int:
        """How many of a reply's ids its reasoning takes, tags included; all of them when it does not end."""
        end = "</think>"
        num = bisect_left(range(len(ids) + 1), True, key=lambda num: end in self._decode(ids[:num]))
        return min(num, len(ids))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding(text).ids
        return ids

    def _encoding(self, text: str) -> Encoding:
        """Its offsets are those of `text`: what is replaced is one character by another."""
        if self._lost and (content := text.encode()) != content.translate(None, self._lost):
            text = "".join("\ufffd" if c.encode().translate(None, self._lost) != c.encode() else c for c in text)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _lost_bytes(tokenizer: Tokenizer) -> bytes:
    """Those that a byte-level tokenizer has no token for, as SmolLM2's has none for U+0004 and for U+40000 and up."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return b""
    others = (byte for byte in range(256) if byte not in _PRINTED)
    names = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return bytes(byte for byte, name in names.items() if tokenizer.token_to_id(name) is None)


def _num_common(prefix: str, text: str) -> int:
    """Length of the longest common prefix; one comparison when `prefix` is a prefix, as it nearly always is."""
    if text.startswith(prefix):
        return len(prefix)
    low, high = 0, min(len(prefix), len(text))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text.startswith(prefix[:middle]) else (low, middle - 1)
    return low
