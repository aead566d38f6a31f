"""Stand-in for a trainer: a process that holds weights and answers with manifests.

Reads one command a line: `load PATH VERSION`, `tear NAME`, `quit`; writes one JSON line for each.
"""

import sys

import msgspec
import torch
from safetensors.torch import load_file

from gyre.workers.transfer import TransferEndpoint, WeightSource


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
