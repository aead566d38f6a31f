"""Shell. A process that owns weights, for benchmarks: `python -m gyre.workers.bench_weights FILE | NxBYTES`.

It prints its manifest, one line of JSON, and keeps the tensors where they are until it is ended. Direction: safetensors
file, or N random tensors of so many bytes -> memory that others read -> manifest.
"""

import re
import signal
import sys

import msgspec
import torch

from gyre.workers.transfer import TransferEndpoint, WeightSource


def main() -> None:
    what = sys.argv[1]
    if size := re.fullmatch(r"(\d+)x(\d+)", what):
        num, num_bytes = int(size[1]), int(size[2])
        generator = torch.Generator().manual_seed(1)
        named = {f"t{i}": torch.randn(num_bytes // 4, generator=generator) for i in range(num)}
    else:
        from safetensors.torch import load_file

        named = load_file(what)
    source = WeightSource(named, TransferEndpoint())
    print(msgspec.json.encode(source.manifest(1)).decode(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
