"""Shell. A model class for mini-swe-agent, through its `model_class` setting: messages -> HTTP -> actions.

Copied beside its config as `gyre_mini_model.py` and imported by mini-swe-agent inside the sandbox: it
knows nothing of gyre. It posts chat/completions with the standard library, since the class that
mini-swe-agent would take imports for eight seconds. Invariant: each request is the one before it plus
what came since. So a reply that mini-swe-agent cannot use stays in the history, before the error.
"""

import dataclasses
import http.client
import json
import os
import time
from typing import Any, NoReturn

from jinja2 import Template
from minisweagent.exceptions import FormatError  # type: ignore[import-not-found,unused-ignore]
from minisweagent.models.utils.actions_toolcall import (  # type: ignore[import-not-found,unused-ignore]
    BASH_TOOL,
    format_toolcall_observation_messages,
)

RETRIED_STATUSES = (408, 409, 425, 429)


@dataclasses.dataclass
class PlainModelConfig:
    model_name: str
    observation_template: str
    format_error_template: str


class PlainModel:
    """What mini-swe-agent's `Model` protocol asks for."""

    def __init__(self, **kwargs: Any) -> None:
        self.config = PlainModelConfig(**kwargs)
        _, _, address = os.environ["OPENAI_BASE_URL"].partition("://")
        host, _, path = address.partition("/")
        self._path = f"/{path.rstrip('/')}/chat/completions"
        self._retry_s = float(os.environ.get("GYRE_RETRY_S", "600"))
        self._connection = http.client.HTTPConnection(host, timeout=self._retry_s)

    def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
        # mini-swe-agent always has a system message; an empty one says nothing.
        sent = [{k: v for k, v in message.items() if k != "extra"} for message in messages]
        body = {
            "model": self.config.model_name,
            "messages": [m for m in sent if m.get("content") or m["role"] != "system"],
        }
        message = self._reply(json.dumps(body | {"tools": [BASH_TOOL]} | kwargs).encode())
        return message | {"extra": {"actions": self._actions(message), "cost": 0.0, "timestamp": time.time()}}

    def format_message(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = format_toolcall_observation_messages(
            actions=message["extra"]["actions"],
            outputs=outputs,
            observation_template=self.config.observation_template,
            template_vars=template_vars,
        )
        return told

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return dataclasses.asdict(self.config)

    def serialize(self) -> dict[str, Any]:
        return {"info": {"config": {"model": dataclasses.asdict(self.config), "model_type": "PlainModel"}}}

    def _actions(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        calls = message.get("tool_calls") or []
        if not calls:
            self._refuse(message, [], "call the tool bash")
        actions = []
        for call in calls:
            function = call.get("function") or {}
            try:
                command = json.loads(function.get("arguments") or "")["command"]
            except (ValueError, KeyError, TypeError):
                command = None
            if function.get("name") != "bash":
                self._refuse(message, calls, f"there is no tool {function.get('name')!r}, only bash")
            if not isinstance(command, str):
                self._refuse(message, calls, 'arguments must be JSON like {"command": "ls"}')
            actions.append({"command": command, "tool_call_id": call.get("id", "")})
        return actions

    def _refuse(self, message: dict[str, Any], calls: list[dict[str, Any]], error: str) -> NoReturn:
        """Keep the reply and answer each of its tool calls, so that the history stays well formed."""
        text = Template(self.config.format_error_template).render(error=error)
        answers: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": call.get("id", ""), "content": text} for call in calls
        ] or [{"role": "user", "content": text}]
        raise FormatError(message | {"extra": {"interrupt_type": "FormatError"}}, *answers)

    def _reply(self, payload: bytes) -> dict[str, Any]:
        """The assistant message. Raises RuntimeError when the gateway refuses, or stays away too long."""
        deadline, pause = time.monotonic() + self._retry_s, 0.1
        while True:
            try:
                message, reason = self._post(payload)
            except (OSError, http.client.HTTPException, ValueError) as error:
                message, reason = None, repr(error)
            if message is not None:
                return message
            if time.monotonic() + pause > deadline:
                raise RuntimeError(f"no answer from the gateway: {reason}")
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _post(self, payload: bytes) -> tuple[dict[str, Any] | None, str]:
        """(message, "") or (None, why it is worth asking again)."""
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}",
        }
        try:
            self._connection.request("POST", self._path, payload, headers)
            response = self._connection.getresponse()
            text = response.read()
        except BaseException:
            self._connection.close()  # the next request opens another
            raise
        if response.status >= 500 or response.status in RETRIED_STATUSES:
            return None, f"{response.status} {text[:200]!r}"
        if response.status != 200:
            raise RuntimeError(f"the gateway refused the call: {response.status} {text[:500].decode(errors='replace')}")
        message = (json.loads(text).get("choices") or [{}])[0].get("message")
        return (message, "") if isinstance(message, dict) else (None, "a reply without a message")
