"""Shell. The first process of every sandbox: harness <- TCP -> this -> socket file of the gateway.

    python -I -S relay.py KEY=VALUE ... -- ARGV ...

It listens on 127.0.0.1 of the private network, passes each connection on to the socket file, runs
the harness as its child, and reports its exit. As process 1 of its namespace it cannot be killed or
stopped from inside, and when it ends the kernel kills whatever is left: nothing outlives it.
Invariant: standard library only, and few modules, since each execution starts two of these: `os`, `signal` and
`socket` without what Python wraps around them, which would double the cost of a start.

Keys: `port`, `socket` (both or none); `lifeline` (fd: `T` asks the child to end, end of file ends
everything); `report` (fd: a line `started`, then one line a command: its exit code, negative for a
signal, or `processes`, `memory`, `disk` or `cpu` for the limit that it broke); `grade` (each argument after `--`
is a command line of its own for `sh -c`, run in order; what one leaves running is killed before the next;
the value is the seconds that each may take); `max_processes`, `max_memory` (bytes, all processes
together); `max_disk` (bytes of the workspace); `max_cpu` (seconds, all processes together); `data`, `fsize`, `nofile`,
`nproc` (limits of one process); `ttl` (seconds after which all of it ends, if nobody has ended it).

Both outputs of the child are descriptor 1. So lifeline and report may be 0 and 2, where a container's client has
nothing else to pass on.
"""

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import _thread
import posix as os
import resource
import sys
import time

CHUNK = 65536
WATCH_S = 0.25
TICKS = os.sysconf("SC_CLK_TCK")
OOM_COUNTS = (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill"))
"""Of version 2 and of version 1."""
NO_INPUT = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
TOGETHER = (os.POSIX_SPAWN_DUP2, 1, 2)
# Of a graded command only the exit code counts, and a flood of output would stop the grading.
QUIET = (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)


def main(args: list[str]) -> None:
    split = args.index("--")
    keys = dict(arg.split("=", 1) for arg in args[:split])
    lifeline, report = int(keys["lifeline"]), int(keys["report"])
    os.set_inheritable(lifeline, False)
    os.set_inheritable(report, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for key, limit in (
        ("data", resource.RLIMIT_DATA),
        ("fsize", resource.RLIMIT_FSIZE),
        ("nofile", resource.RLIMIT_NOFILE),
        ("nproc", resource.RLIMIT_NPROC),
    ):
        if key in keys:
            most = resource.getrlimit(limit)[1]
            value = int(keys[key]) if most == resource.RLIM_INFINITY else min(int(keys[key]), most)
            resource.setrlimit(limit, (value, value))
    # Blocked before the first thread, so that only the main thread takes them, and only when it asks.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if "port" in keys:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(keys["port"])))
        listener.listen(64)
        _thread.start_new_thread(accept, (listener, keys["socket"]))
    child = [0]
    _thread.start_new_thread(watch_lifeline, (lifeline, child))
    commands = [args[split + 1 :]]
    timeout_s = float(keys.get("ttl", "inf"))
    graded = "grade" in keys
    if graded:
        hide()
        timeout_s = float(keys["grade"])
        commands = [["/bin/sh", "-c", line] for line in args[split + 1 :]]
    limits = int(keys["max_processes"]), int(keys["max_memory"]), int(keys["max_cpu"]), Disk(int(keys["max_disk"]))
    os.write(report, b"started\n")
    for command in commands:
        os.write(report, b"%s\n" % run(command, child, timeout_s, limits, graded).encode())
        if graded:
            end_all()
    os._exit(0)


class Disk:
    """What lies in the working directory. It is counted only when its file system has lost as much as it may still
    grow, so a program that writes little costs one system call a look. What cannot be counted then is too much."""

    def __init__(self, limit: int) -> None:
        self.limit = self.room = limit
        self.most_free = self.free()

    @staticmethod
    def free() -> int:
        found = os.statvfs(".")
        return found.f_bavail * found.f_frsize

    def is_full(self) -> bool:
        free = self.free()
        self.most_free = max(self.most_free, free)
        if self.most_free - free <= self.room:
            return False
        try:
            used = used_bytes(".") + deleted_bytes(os.stat(".").st_dev)
        except OSError:
            return True  # closed or too deep for a path
        self.most_free, self.room = free, max(self.limit - used, self.limit // 16)
        return used > self.limit


def used_bytes(folder: str) -> int:
    """As allocated; links are not followed, and a file of several names counts once. Raises OSError."""
    total, seen, folders = 0, set(), [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # gone meanwhile
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif found.st_nlink > 1:
                        if found.st_ino in seen:
                            continue
                        seen.add(found.st_ino)
                    total += found.st_blocks * 512
        except (FileNotFoundError, NotADirectoryError):
            continue
    return total


def deleted_bytes(device: int) -> int:
    """Of files that have no name any more, and that a process here has open."""
    found: dict[int, int] = {}
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                file = os.stat(f"/proc/{pid}/fd/{name}")
                if file.st_nlink == 0 and file.st_dev == device:
                    found[file.st_ino] = file.st_blocks * 512
        except OSError:
            continue  # ended meanwhile
    return sum(found.values())


def run(
    command: list[str], child: list[int], timeout_s: float, limits: tuple[int, int, int, Disk], graded: bool
) -> str:
    """Run one command to its end, reaping every orphan on the way. -> exit code, or the limit that it broke."""
    deadline = time.monotonic() + timeout_s
    try:
        child[0] = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            setpgroup=0,
            setsigmask=(),
            file_actions=(NO_INPUT, *((QUIET,) if graded else ()), TOGETHER),
        )
    except OSError as error:
        if graded:
            raise
        os.write(1, f"{command[0]}: {error.strerror}\n".encode())
        return "127"
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, WATCH_S)
        code = reap(child[0])
        if code is not None:
            return "memory" if code and out_of_memory() else str(code)
        if time.monotonic() > deadline:
            return str(-signal.SIGKILL)
        broken = exceeded(*limits)
        if broken:
            return broken


def reap(child: int) -> int | None:
    """Collect all that ended; the exit code of `child` if it did."""
    code = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return code
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return code


def end_all() -> None:
    """Kill everything but this process, and wait until it is gone."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):
        return


def exceeded(max_processes: int, max_memory: int, max_cpu: int, disk: Disk) -> str:
    """The limit on all processes together that is broken, if any. /proc shows only this namespace."""
    if disk.is_full():
        return "disk"
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    if len(pids) > max_processes:
        return "processes"
    pages = ticks = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123
                fields = file.read().split()
            pages += int(fields[1]) - int(fields[2])
            with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own, and of children that it has reaped
        except OSError:
            continue  # ended meanwhile
    if ticks > max_cpu * TICKS:
        return "cpu"
    return "memory" if pages * resource.getpagesize() > max_memory else ""


def out_of_memory() -> bool:
    """Whether the kernel killed something for it: where there is a cgroup of our own, it comes before our next look."""
    for path, key in OOM_COUNTS:
        try:
            with open(path) as file:  # noqa: PTH123
                return any(line.split()[0] == key and line.split()[1] != "0" for line in file)
        except OSError:
            continue
    return False


def hide() -> None:
    """Deny debuggers and /proc/1/fd to the children, so that no graded program can write to the report."""
    import _ctypes  # the package around it costs a quarter of a start

    PR_SET_DUMPABLE = 4
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]  # of this process
    if _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0)) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE)")


def watch_lifeline(lifeline: int, child: list[int]) -> None:
    while os.read(lifeline, 1):
        if child[0]:
            try:
                os.killpg(child[0], signal.SIGTERM)
            except ProcessLookupError:
                continue
    os._exit(1)


def accept(listener: socket.socket, path: str) -> None:
    while True:
        handle, _ = listener._accept()  # type: ignore[attr-defined]
        inside = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=handle)
        outside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            outside.connect(path)
            inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _thread.start_new_thread(pump, (inside, outside))
            _thread.start_new_thread(pump, (outside, inside))
        except (OSError, RuntimeError):  # the gateway is away, or no thread is left
            abort(inside)
            abort(outside)


def pump(source: socket.socket, sink: socket.socket) -> None:
    """One direction of one connection. An abort is passed on as an abort, never as a clean end."""
    try:
        while chunk := source.recv(CHUNK):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        abort(source)
        abort(sink)


def abort(connection: socket.socket) -> None:
    """Close it and wake the thread that reads from it. The harness sees a reset, with no end of stream before."""
    try:
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.shutdown(socket.SHUT_RD)
        else:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1:])
