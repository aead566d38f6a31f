"""Logins of servers that know no passwords: an operator's accounts and users, each a signed token, with TLS beside."""

import asyncio
import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from gyre.errors import ConfigError, StreamError
from gyre.events.jetstream import connect
from gyre.events.log import open_writer
from gyre.events.permissions import may_publish
from gyre.events.server import find_server
from gyre.events.streams import load_streams
from tests.events.events import failed, ticking

PLAIN = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {"wildcards": True}
JETSTREAM = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
REFUSED_S = 60.0
"""More than it takes: who is refused is told at once."""
_HEAD = b'{"typ":"JWT","alg":"ed25519-nkey"}'


class Operator:
    """What `nsc` keeps: keys of an operator, of one account and of the server's own; makes users' creds files."""

    def __init__(self) -> None:
        self.key, self.account, self.system = _key("operator"), _key("account"), _key("account")

    def server_config(self) -> str:
        operator = _token(self.key, self.key, {"type": "operator", "system_account": _public(self.system)})
        accounts = ((self.account, PLAIN | JETSTREAM), (self.system, PLAIN))
        preload = ", ".join(
            f"{_public(key)}: {_token(self.key, key, {'type': 'account', 'limits': limits})}"
            for key, limits in accounts
        )
        return (
            f"operator: {operator}\nsystem_account: {_public(self.system)}\nresolver: MEMORY\n"
            f"resolver_preload: {{ {preload} }}\n"
        )

    def creds(self, path: Path, **permissions: Any) -> Path:
        user = _key("user")
        claims = {"type": "user", "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}} | permissions
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{_token(self.account, user, claims)}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
        )
        return path


def _key(kind: str) -> nkeys.KeyPair:
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), getattr(nkeys, f"PREFIX_BYTE_{kind.upper()}")))


def _public(key: nkeys.KeyPair) -> str:
    return str(key.public_key.decode())


def _token(signer: nkeys.KeyPair, subject: nkeys.KeyPair, claims: dict[str, Any]) -> str:
    def part(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

    whole = {
        "iat": int(time.time()),
        "iss": _public(signer),
        "sub": _public(subject),
        "name": claims["type"],
        "jti": os.urandom(8).hex(),
        "nats": {"version": 2, **claims},
    }
    text = f"{part(_HEAD)}.{part(json.dumps(whole).encode())}"
    return f"{text}.{part(signer.sign(text.encode()))}"


@pytest.fixture(scope="module")
def operator() -> Operator:
    return Operator()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    key, cert = directory / "key.pem", directory / "cert.pem"
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=gyre"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", *made, *names], check=True, capture_output=True)
    return key, cert


@pytest.fixture(scope="module")
def url(operator: Operator, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of that operator, over TLS."""
    directory = tmp_path_factory.mktemp("operator")
    (key, cert), ports = certificate, directory / "ports"
    ports.mkdir()
    config = directory / "server.conf"
    config.write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: "{ports}"\njetstream {{ store_dir: "{directory / "store"}" }}\n'
        f'tls {{ cert_file: "{cert}", key_file: "{key}" }}\n{operator.server_config()}'
    )
    with (directory / "log").open("wb") as log, subprocess.Popen([find_server(), "-c", config], stderr=log) as child:
        try:
            while not (found := "".join(path.read_text() for path in ports.glob("*.ports"))):
                assert child.poll() is None, (directory / "log").read_text()
                time.sleep(0.02)
            yield json.loads(found)["nats"][0].replace("nats://", "tls://")
        finally:
            child.terminate()


def test_a_creds_file_opens_the_log_over_tls(
    url: str, operator: Operator, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    creds, (_, ca) = operator.creds(tmp_path / "user.creds"), certificate

    async def main() -> None:
        log = await connect(url, "r", create=load_streams(), credentials=creds, tls_ca=ca)
        writer = await open_writer(log, "w", ticking())
        assert await writer.append(failed(1)) == 1
        assert [r.event async for r in log.read(until=1)] == [failed(1)]
        await log.close()
        with pytest.raises(StreamError, match=r"cannot connect: .*certificate"):
            await connect(url, "r", credentials=creds, timeout_s=REFUSED_S)
        with pytest.raises(StreamError, match=r"cannot connect: .*Authorization"):
            await connect(url, "r", tls_ca=ca, timeout_s=REFUSED_S)
        with pytest.raises(StreamError, match=r"cannot connect: .*Authorization"):
            await connect(
                url, "r", tls_ca=ca, credentials=Operator().creds(tmp_path / "foreign.creds"), timeout_s=REFUSED_S
            )

    asyncio.run(main())


def test_a_user_s_permissions_are_those_of_its_token(
    url: str, operator: Operator, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """The lists of `permissions.py` hold there as they are."""
    gateway = operator.creds(
        tmp_path / "gateway.creds", pub={"allow": list(may_publish("gateway"))}, sub={"allow": ["_INBOX.>"]}
    )
    reader = operator.creds(
        tmp_path / "reader.creds", pub={"allow": list(may_publish("reader"))}, sub={"allow": ["_INBOX.>"]}
    )
    owner, (_, ca) = operator.creds(tmp_path / "owner.creds"), certificate

    async def main() -> None:
        await (await connect(url, "p", create=load_streams(), credentials=owner, tls_ca=ca)).close()
        log = await connect(url, "p", credentials=gateway, tls_ca=ca)
        assert await (await open_writer(log, "gateway", ticking())).append(failed(1)) == 1
        with pytest.raises(StreamError, match=r"STREAM\.PURGE\.GYRE_p: the role of this credential may not ask it"):
            await log.wire.api("STREAM.PURGE.GYRE_p", {})
        await log.close()
        log = await connect(url, "p", credentials=reader, tls_ca=ca)
        assert [r.event async for r in log.read(until=1)] == [failed(1)]
        with pytest.raises(StreamError, match="may not write there"):
            await (await open_writer(log, "reader", ticking())).append(failed(2))
        await log.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "text",
    ["", "no creds\n", "-----BEGIN NATS USER JWT-----\nx\n------END NATS USER JWT------\n"],
)
def test_a_file_that_is_no_creds_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.creds"
    path.write_text(text)

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"log\.credentials: .*bad\.creds: .*creds file"):
            await connect("nats://127.0.0.1:1", "r", credentials=path, timeout_s=REFUSED_S)

    asyncio.run(main())
