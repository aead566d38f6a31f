"""Shell. A cluster of nats-servers on loopback: `python -m gyre.events.cluster DIR`, until Ctrl-C.

Invariant: it is an embedded server times three, with the same users and the same private files, which keeps each event
of a stream with `num_replicas: 3` on every server and goes on while two of them are there. On one machine it is for
trying things out: it survives a server, not a disk.
"""

import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from gyre.errors import ConfigError
from gyre.events.permissions import ServerRole
from gyre.events.server import LOOPBACK, Server, free_ports, make_passwords, read_passwords

SIZE = 3


class Host(NamedTuple):
    """Where a server of the cluster runs."""

    address: str = LOOPBACK
    via: tuple[str, ...] = ()
    """The command that starts it there, if it is not here."""


class Cluster:
    """Its servers, by name: `n1`, `n2`, `n3`."""

    def __init__(self, servers: dict[str, Server]) -> None:
        self.servers = servers
        self.url = ",".join(server.url for server in servers.values())

    def credential(self, role: ServerRole) -> str:
        return next(iter(self.servers.values())).credential(role)

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


def start_cluster(
    directory: Path, *, sync: Literal["always", "default"] = "always", hosts: Sequence[Host] = (Host(),) * SIZE
) -> Cluster:
    """Over `directory` (made when missing), on free ports. Raises ProcessError, MissingError."""
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    make_passwords(directory)
    passwords, route_password = read_passwords(directory), secrets.token_urlsafe(24)
    names = tuple(f"n{number + 1}" for number in range(SIZE))
    ports = free_ports(2 * SIZE)
    routes = ", ".join(
        f'"nats-route://route:{route_password}@{host.address}:{port}"'
        for host, port in zip(hosts, ports[SIZE:], strict=True)
    )
    servers = {}
    for name, host, port, route_port in zip(names, hosts, ports[:SIZE], ports[SIZE:], strict=True):
        (directory / name).mkdir(exist_ok=True)
        more = (
            f"server_name: {name}\n"
            f'cluster {{ name: gyre, listen: "{host.address}:{route_port}", routes: [{routes}], '
            f'authorization {{ user: route, password: "{route_password}" }} }}\n'
        )
        servers[name] = Server(
            directory / name, port, passwords, sync, directory / f"{name}.log", more, host.address, host.via
        )
    cluster = Cluster(servers)
    try:
        for server in servers.values():
            server.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def main(argv: Sequence[str]) -> None:
    if len(argv) != 1:
        raise ConfigError("usage: python -m gyre.events.cluster DIR")
    directory = Path(argv[0])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster = start_cluster(directory)
    try:
        print(
            f"{SIZE} servers in {directory}, until Ctrl-C. In a run's config:\n"
            f"  log: {{url: '{cluster.url}', num_replicas: {SIZE}}}\n"
            "and for its processes:\n"
            f'  export GYRE_NATS_TOKEN="$(grep ^owner: {directory.resolve()}/users)"',
            flush=True,
        )
        while True:
            signal.pause()
    except KeyboardInterrupt:
        cluster.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
