"""Stand-in for a trainer: a process that holds weights and answers with manifests.

Reads one command a line: `load PATH VERSION`, `tear NAME`, `quit`; writes one JSON line for each.
"""

import subprocess
import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from gyre.workers.manifest import WeightManifest
from gyre.workers.transfer import TransferEndpoint, WeightSource


class Owner:
    """The test's end of such a process."""

    def __init__(self) -> None:
        argv = [sys.executable, __file__]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(command, file=self.process.stdin, flush=True)
        while not (line := self.process.stdout.readline()).startswith("{"):
            assert line, "the weight owner is gone"
        return line

    def load(self, path: Path, version: int) -> WeightManifest:
        return msgspec.json.decode(self.ask(f"load {path} {version}"), type=WeightManifest)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    named: dict[str, torch.Tensor] = {}
    source: WeightSource | None = None
    for line in sys.stdin:
        match line.split():
            case ["load", path, version]:
                for name, tensor in load_file(path).items():
                    if name in named:
                        named[name].copy_(tensor)
                    else:
                        named[name] = tensor.clone()
                source = source or WeightSource(named, TransferEndpoint())
                print(msgspec.json.encode(source.manifest(int(version))).decode(), flush=True)
            case ["tear", name]:
                named[name].view(-1)[-1] += 1
                print("{}", flush=True)
            case _:
                break


if __name__ == "__main__":
    main()
