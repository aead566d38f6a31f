"""Hosts of their own on this machine: network namespaces and small disks.

    unshare -Urnm python -m MODULE ...

Invariant: whatever is set up vanishes with the last process of the new namespaces, and the machine's own network and
mounts are never touched. `inside()` is a new user, network and mount namespace; where the kernel or its policy does not
allow one, `why_not()` says what it answered.
"""

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gyre.events.cluster import Host

_MARK = "GYRE_IN_NAMESPACES"
_CLONE_NEWNET = 0x40000000
NAMES = ("n1", "n2", "n3")


def is_inside() -> bool:
    return _MARK in os.environ


@functools.cache
def why_not() -> str:
    """Empty where namespaces can be made."""
    test = "ip link set lo up && ip link add try1 type veth peer name try2 && mount -t tmpfs -o size=1m x /run"
    try:
        done = subprocess.run(["unshare", "-Urnm", "sh", "-c", test], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unshare (util-linux) is not installed"
    return "" if done.returncode == 0 else f"no namespaces here: {' '.join((done.stderr or 'no reason').split())}"


def command_inside(argv: Sequence[str]) -> list[str]:
    """The command, in namespaces of its own."""
    return ["unshare", "-Urnm", "sh", "-c", f'ip link set lo up && {_MARK}=1 exec "$@"', "sh", *argv]


def enter(argv: Sequence[str]) -> None:
    """This program again, inside; returns where it is inside already or cannot be."""
    if not is_inside() and not why_not():
        command = command_inside([sys.executable, *argv])
        os.execvp(command[0], command)
    if is_inside():
        # Else megabytes lie in the kernel before a server feels that nobody reads.
        Path("/proc/sys/net/ipv4/tcp_wmem").write_text("4096 16384 65536")


def sh(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)


def make_hosts() -> tuple[Host, ...]:
    """Three hosts, each on a wire of its own to this one, which passes on what they say to each other. Once, inside."""
    sh("mount -t tmpfs -o size=1m hosts /run")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    hosts = []
    for number, name in enumerate(NAMES, start=1):
        here, there = f"10.77.{number}.1", f"10.77.{number}.2"
        sh(f"ip netns add {name}", f"ip link add {name} type veth peer name eth0 netns {name}")
        sh(f"ip addr add {here}/24 dev {name}", f"ip link set {name} up", f"ip -n {name} link set lo up")
        sh(f"ip -n {name} addr add {there}/24 dev eth0", f"ip -n {name} link set eth0 up")
        sh(f"ip -n {name} route add default via {here}")
        hosts.append(Host(there, ("nsenter", f"--net=/run/netns/{name}")))
    return tuple(hosts)


def unplug(name: str) -> None:
    """Nothing gets from or to this host any more, and nobody is told."""
    sh(f"ip link set {name} down")


def plug(name: str) -> None:
    sh(f"ip link set {name} up")


def join_host(name: str) -> None:
    """This process, from now on, is on that host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{name}").open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")


class Disk:
    """A small file system that can be filled up and emptied again."""

    def __init__(self, path: Path, size: str) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        sh(f"mount -t tmpfs -o size={size} disk {path}")
        self._ballast = path / "ballast"

    def fill(self) -> bool:
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return True

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        sh(f"umount -l {self.path}")
