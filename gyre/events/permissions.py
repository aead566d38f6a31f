"""Pure. Who may do what on a NATS server: one user a role, with the subjects that it may publish to.

role -> permissions -> the `authorization` block of a server's config. Invariant: whoever is not the owner can write
only events of its own aggregates, and cannot make, change or delete a stream.

The subject is the aggregate, not the type, so roles that share an aggregate are told apart by nothing: the gateway
answers fences on the subjects of cells, the scheduler says there which one is lost, and both could claim a cell's facts
there. The gateway cannot command: commands stand on the scheduler's subject, and a reader refuses an event that stands
on another's.
"""

import json
from collections.abc import Mapping
from typing import Literal, get_args

ServerRole = Literal["owner", "gateway", "dispatcher", "projector", "scheduler", "cell", "reader"]
"""Of the processes of a run each has its own name; a cell's trainer is part of the cell. The owner makes the streams,
and supervises. The reader is for everybody else."""
ROLES: tuple[ServerRole, ...] = get_args(ServerRole)

_READ = (
    "$JS.API.STREAM.INFO.*",
    "$JS.API.STREAM.MSG.GET.*",
    "$JS.API.DIRECT.GET.*",
    "$JS.API.CONSUMER.CREATE.*",
    "$JS.API.CONSUMER.MSG.NEXT.*.*",
    "$JS.API.CONSUMER.DELETE.*.*",
)
"""What the reader of a log asks the server."""
_BLOBS = "gyre-blob.*.*"
"""Large bodies of anybody who writes: content-addressed, and verified by who reads them."""
_AGGREGATES: dict[ServerRole, tuple[str, ...]] = {
    "gateway": ("call", "cell"),
    "dispatcher": ("group", "execution", "run"),
    "projector": ("run",),
    "scheduler": ("scheduler", "cell"),
    "cell": ("cell", "policy", "run"),
}
_KEYS: dict[ServerRole, tuple[str, ...]] = {"scheduler": ("$KV.*.scheduler",), "cell": ("$KV.*.alive.*",)}
"""Who leads, and who is there."""
_SUBSCRIBE = ("_INBOX.>",)


def may_publish(role: ServerRole) -> tuple[str, ...]:
    """Subjects; `>` is all of them."""
    if role == "owner":
        return (">",)
    written = tuple(f"gyre.*.{aggregate}.*" for aggregate in _AGGREGATES.get(role, ()))
    return (*_READ, *written, *_KEYS.get(role, ()), *((_BLOBS,) if written else ()))


def authorization(passwords: Mapping[ServerRole, str]) -> str:
    """The block of a nats-server config: a user of each role's name."""
    users = []
    for role, password in passwords.items():
        user = f"{{ user: {role}, password: {json.dumps(password)}"
        if role != "owner":
            publish, subscribe = json.dumps(may_publish(role)), json.dumps(_SUBSCRIBE)
            user += f", permissions: {{ publish: {{ allow: {publish} }}, subscribe: {{ allow: {subscribe} }} }}"
        users.append(user + " }")
    return "authorization { users: [\n  " + "\n  ".join(users) + "\n] }\n"
