"""Pure. Recipes of the harnesses that come from the npm registry: order -> Launch.

Each is pinned to the version whose traffic was recorded, and told by its own settings alone: where its provider is,
which model does titles and the like, how long the context is, and to wait for a policy that is slow. Nothing of it
is kept: settings lie in the private config folder, its home goes with the sandbox.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from gyre.agents.recipe import API_KEY, HELPER_MODEL, Launch, Order, Recipe

_NODE = "node-linux-{arch}@22.23.5"
_NODE_PROGRAM = ("node", "node_modules/node-linux-{arch}/bin/node")
PATIENCE_S = 3600
"""How long a stream may be silent: while every cell trains, calls wait."""
COMPACT_AT = 0.8
"""Of the context, where a harness can be told."""

RECIPES = (
    Recipe(
        name="claude-code",
        kind="npm",
        version="2.1.332",
        packages=("@anthropic-ai/claude-code-linux-{arch}@2.1.332",),
        programs=(("claude", "node_modules/@anthropic-ai/claude-code-linux-{arch}/claude"),),
        about="Anthropic Messages; 384 MB",
    ),
    Recipe(
        name="codex",
        kind="npm",
        version="0.171.0",
        packages=("@openai/codex@0.171.0",),
        programs=(("codex", "node_modules/@openai/codex-linux-{arch}/vendor/{machine}-unknown-linux-musl/bin/codex"),),
        about="OpenAI Responses; 424 MB",
    ),
    Recipe(
        name="qwen-code",
        kind="npm",
        version="0.24.4",
        packages=("@qwen-code/qwen-code@0.24.4", _NODE),
        programs=(("qwen", "node_modules/@qwen-code/qwen-code/cli-entry.js"), _NODE_PROGRAM),
        about="OpenAI Chat Completions; 329 MB",
    ),
    Recipe(
        name="opencode",
        kind="npm",
        version="1.18.33",
        packages=("opencode-ai@1.18.33",),
        programs=(("opencode", "node_modules/opencode-linux-{arch}/bin/opencode"),),
        process_memory=8 << 30,  # its runtime reserves more than it uses, and aborts where it may not
        about="OpenAI Chat Completions; 354 MB",
    ),
    Recipe(
        name="pi",
        kind="npm",
        version="0.73.1",
        packages=("@mariozechner/pi-coding-agent@0.73.1", _NODE),
        programs=(("pi", "node_modules/@mariozechner/pi-coding-agent/dist/cli.js"), _NODE_PROGRAM),
        about="OpenAI Chat Completions; 389 MB",
    ),
)


def claude_code(order: Order) -> Launch:
    flags = ("--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose")
    return Launch(
        argv=(
            f"{order.folder}/bin/claude",
            "-p",
            *flags,
            "--max-turns",
            str(order.max_turns),
            "--",
            order.instruction,
        ),
        env={
            "IS_SANDBOX": "1",  # else it refuses to go without permissions where it runs as root
            "CLAUDE_CONFIG_DIR": f"{order.places.home}/claude",
            "ANTHROPIC_BASE_URL": order.root_url,
            "ANTHROPIC_API_KEY": API_KEY,
            "ANTHROPIC_MODEL": order.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": HELPER_MODEL,
            "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
            # It stands in the system prompt and changes after a compaction, so histories would not continue.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(order.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(order.max_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": str(PATIENCE_S * 1000),
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
        },
    )


def codex(order: Order) -> Launch:
    settings: dict[str, str | int | bool] = {
        "model": order.model,
        "model_provider": "gyre",
        "model_context_window": order.context_tokens,
        "model_auto_compact_token_limit": int(order.context_tokens * COMPACT_AT),
        "check_for_update_on_startup": False,
    }
    provider: dict[str, str | int | bool] = {
        "name": "gyre",
        "base_url": order.base_url,
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
        "request_max_retries": 10,
        "stream_max_retries": 10,
        "stream_idle_timeout_ms": PATIENCE_S * 1000,
    }
    # Analytics would make it wait five seconds for a network that it does not have.
    toml = f"{_toml(settings)}\n[analytics]\nenabled = false\n\n[model_providers.gyre]\n{_toml(provider)}"
    flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    argv = (f"{order.folder}/bin/codex", "exec", *flags, "--", order.instruction)
    home = f"{order.places.home}/codex"
    return Launch(
        argv=_at_home(order, "config.toml", home, argv),
        env={"CODEX_HOME": home, "OPENAI_API_KEY": API_KEY},
        written=(("config.toml", toml),),
    )


def qwen_code(order: Order) -> Launch:
    settings = {
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "model": {
            "name": order.model,
            "maxSessionTurns": order.max_turns,
            "generationConfig": {
                "contextWindowSize": order.context_tokens,
                "timeout": PATIENCE_S * 1000,
                "samplingParams": {"max_tokens": order.max_tokens},
            },
        },
    }
    flags = ("--auth-type", "openai", "--yolo", "--output-format", "stream-json")
    argv = (f"{order.folder}/bin/node", f"{order.folder}/bin/qwen", *flags, f"--prompt={order.instruction}")
    return Launch(
        argv=_at_home(order, "settings.json", f"{order.places.home}/.qwen", argv),
        env={
            "HOME": order.places.home,
            "OPENAI_BASE_URL": order.base_url,
            "OPENAI_API_KEY": API_KEY,
            "OPENAI_MODEL": order.model,
        },
        written=(("settings.json", _json(settings)),),
    )


def opencode(order: Order) -> Launch:
    limit = {"context": order.context_tokens, "output": order.max_tokens}
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "model": f"gyre/{order.model}",
        "small_model": f"gyre/{HELPER_MODEL}",
        "permission": {"*": "allow"},
        "provider": {
            "gyre": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "gyre",
                "options": {"baseURL": order.base_url, "apiKey": API_KEY, "timeout": PATIENCE_S * 1000},
                "models": {order.model: {"limit": limit}, HELPER_MODEL: {"limit": limit}},
            }
        },
    }
    return Launch(
        argv=(f"{order.folder}/bin/opencode", "run", "--format", "json", "--", order.instruction),
        env={
            "HOME": order.places.home,
            "OPENCODE_CONFIG": f"{order.places.config}/opencode.json",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        },
        written=(("opencode.json", _json(settings)),),
    )


def pi(order: Order) -> Launch:
    model = {"id": order.model, "contextWindow": order.context_tokens, "maxTokens": order.max_tokens}
    provider = {"baseUrl": order.base_url, "api": "openai-completions", "apiKey": API_KEY, "models": [model]}
    home = f"{order.places.home}/pi"
    argv = (f"{order.folder}/bin/node", f"{order.folder}/bin/pi", "--provider", "gyre", "--model", order.model)
    return Launch(
        argv=_at_home(order, "models.json", home, (*argv, "--mode", "json", "-p", order.instruction)),
        env={"PI_OFFLINE": "1", "PI_CODING_AGENT_DIR": home},
        written=(("models.json", _json({"providers": {"gyre": provider}})),),
    )


LAUNCHES: Mapping[str, Callable[[Order], Launch]] = {
    "claude-code": claude_code,
    "codex": codex,
    "qwen-code": qwen_code,
    "opencode": opencode,
    "pi": pi,
}


def _at_home(order: Order, name: str, home: str, argv: tuple[str, ...]) -> tuple[str, ...]:
    """For a harness that also writes where it reads its settings, which the config folder does not let it."""
    script = 'mkdir -p "$2" && cp "$1" "$2/" && shift 2 && exec "$@"'
    return ("/bin/sh", "-c", script, "gyre", f"{order.places.config}/{name}", home, *argv)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _toml(values: Mapping[str, str | int | bool]) -> str:
    """Texts, numbers and booleans are written alike in JSON and TOML."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
