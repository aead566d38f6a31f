"""Golden bodies, one a type: `python -m tests.events.golden_files` writes those that are missing, never another."""

import json
from pathlib import Path
from typing import Any

from gyre.events.codec import body_digest, encode
from gyre.events.types import EVENT_TYPES, Event
from tests.events.events import envelope, example

GOLDEN = Path(__file__).parent / "golden"


def golden_of(cls: type[Event]) -> dict[str, Any]:
    """What stands in the golden file: the body, and its header as JSON for those who read a diff."""
    body = encode(envelope(example(cls), 7, writer="writer", prev="0" * 32))
    header_end = 4 + int.from_bytes(body[:4], "big")
    return {"digest": body_digest(body), "header": json.loads(body[4:header_end]), "body_hex": body.hex()}


def main() -> None:
    for name, cls in EVENT_TYPES.items():
        path = GOLDEN / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(golden_of(cls), indent=2) + "\n")
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
