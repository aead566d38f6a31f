"""Pure. Who may do what on a NATS server: one user a role, with the subjects that it may publish to.

role -> permissions -> the `accounts` block of a server's config. Invariant: whoever is not the owner can write only
events of its own aggregates, and cannot make, change or delete a stream; a reader can have nothing stored at all.

The subject is the aggregate, not the type, so roles that share an aggregate are told apart by nothing: the gateway
answers fences on the subjects of cells, the scheduler says there which one is lost, and both could claim a cell's facts
there. The gateway cannot command: commands stand on the scheduler's subject, and a reader refuses an event that stands
on another's.
"""

import json
from collections.abc import Mapping
from itertools import count
from typing import Literal, get_args

from gyre.events.types import Aggregate

ServerRole = Literal["owner", "gateway", "dispatcher", "projector", "scheduler", "cell", "reader"]
"""Of the processes of a run each has its own name; a cell's trainer is part of the cell. The owner makes the streams,
and supervises. The reader is for everybody else."""
ROLES: tuple[ServerRole, ...] = get_args(ServerRole)

_API = "$JS.API."
_SERVICE = "gyre-read"
_READ = (
    "$JS.API.STREAM.INFO.*",
    "$JS.API.STREAM.MSG.GET.*",
    "$JS.API.DIRECT.GET.*",
    "$JS.API.DIRECT.GET.*.>",
    "$JS.API.CONSUMER.CREATE.*",
    "$JS.API.CONSUMER.CREATE.*.*",
    "$JS.API.CONSUMER.CREATE.*.*.>",
    "$JS.API.CONSUMER.INFO.*.*",
    "$JS.API.CONSUMER.MSG.NEXT.*.*",
    "$JS.API.CONSUMER.DELETE.*.*",
)
"""What the reader of a log asks the server: gyre itself, and NATS clients of any language, which name their consumers
and what those want in the subject."""
_BLOBS = "gyre-blob.*.*"
"""Large bodies of anybody who writes: content-addressed, and verified by who reads them."""
_AGGREGATES: dict[ServerRole, tuple[Aggregate, ...]] = {
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


def writers(aggregate: Aggregate) -> tuple[ServerRole, ...]:
    """The roles that may append events of an aggregate."""
    return ("owner", *(role for role, written in _AGGREGATES.items() if aggregate in written))


def accounts(passwords: Mapping[ServerRole, str]) -> str:
    """The block of a nats-server config: a user of each role's name, and the reader in an account of its own.

    A server checks where a request goes, not where its answer shall go. So a reader could have answers stored, on a
    subject of a run. From an account of its own it asks a service of the other one, and the answers come to its own,
    where no stream listens.
    """
    asks, exports, imports = [], [], []
    for subject in _READ:
        kind = "stream" if ".NEXT." in subject else "singleton"
        exports.append(f'{{ service: "{subject}", response_type: {kind} }}')
        imports.append(f'{{ service: {{ account: GYRE, subject: "{subject}" }}, to: "{_as_service(subject)}" }}')
        asks.append(f'"{subject}": "{_as_service(subject)}"')
    users = {role: _user(role, password, may_publish(role)) for role, password in passwords.items()}
    # A server looks at what a user may publish to after it has mapped the subject.
    users["reader"] = _user("reader", passwords["reader"], tuple(f"{_SERVICE}.{s.removeprefix(_API)}" for s in _READ))
    others = [user for role, user in users.items() if role != "reader"]
    return (
        f"accounts {{\n  GYRE {{ jetstream: enabled, {_block('users', others)}, {_block('exports', exports)} }}\n"
        f"  READERS {{ {_block('users', [users['reader']])}, mappings: {{ {', '.join(asks)} }},\n"
        f"    {_block('imports', imports)} }}\n}}\n"
    )


def one_account(passwords: Mapping[ServerRole, str]) -> str:
    """As `accounts`, for a server whose streams are in the account without a name: another would not see them."""
    users = [_user(role, password, may_publish(role)) for role, password in passwords.items()]
    return f"authorization {{ {_block('users', users)} }}\n"


def _user(role: ServerRole, password: str, publish: tuple[str, ...]) -> str:
    user = f"{{ user: {role}, password: {json.dumps(password)}"
    if role != "owner":
        allowed = f"publish: {{ allow: {json.dumps(publish)} }}, subscribe: {{ allow: {json.dumps(_SUBSCRIBE)} }}"
        user += f", permissions: {{ {allowed} }}"
    return user + " }"


def _block(name: str, items: list[str]) -> str:
    return f"{name}: [\n    " + "\n    ".join(items) + "\n  ]"


def _as_service(subject: str) -> str:
    """Its name in the reader's account, where the server's own API would find no streams. Each `*` gets its number."""
    numbers = count(1)
    tokens = subject.removeprefix(_API).split(".")
    return ".".join([_SERVICE, *(f"${next(numbers)}" if token == "*" else token for token in tokens)])
