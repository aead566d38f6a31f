"""A harness for runs under `make chaos`: it speaks to the gateway, then does what chance says, so that scores differ.

Runs as `python -I -S -c <this text> <base URL> <instruction> [TURNS HELD]` in a workspace; standard library only. Where
HELD is found in the URL, each turn waits for a file in the workspace: `turn-0`, `turn-1`... It asks again for as long
as the gateway or the engine is away.
"""

import hashlib
import json
import pathlib
import re
import sys
import time
import urllib.error
import urllib.request

TURNS, PAUSE_S, PATIENCE_S = 2, 0.15, 50.0


def hash_of(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[0]


def ask(url: str, messages: list) -> dict:
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    give_up = time.monotonic() + PATIENCE_S
    while True:
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)["choices"][0]["message"]
        except (OSError, ValueError, urllib.error.HTTPError) as error:
            if getattr(error, "code", 500) < 500 or time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def main() -> None:
    url, instruction = sys.argv[1] + "/chat/completions", sys.argv[2]
    messages = [{"role": "user", "content": instruction}]
    turns, held = sys.argv[3:] or (TURNS, "")
    is_held = bool(held and re.search(held, url))
    for turn in range(int(turns)):
        while is_held and not pathlib.Path(f"turn-{turn}").exists():
            time.sleep(0.05)
        reply = ask(url, messages)
        messages += [reply, {"role": "user", "content": "Go on"}]
        time.sleep(PAUSE_S)
    said = str(reply.get("content"))
    for name in re.findall(r"\w+[.](?:txt|md|log)", instruction):
        luck = hash_of(name + said) % 3
        if luck == 0:
            pathlib.Path(name).unlink(missing_ok=True)
        elif luck == 1:
            pathlib.Path(name).write_text("2\n")


if __name__ == "__main__":
    main()
