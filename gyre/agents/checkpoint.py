"""Shell. Reads what the gateway needs of a policy directory: its tokenizer and chat template, never weights.

policy directory (Hugging Face format) -> Renderer. Imports neither torch nor transformers, so a gateway starts fast.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gyre.agents.renderer import Renderer
from gyre.errors import PolicyError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_renderer(policy_dir: Path | str) -> Renderer:
    """Raises PolicyError when a file is missing or torn, or the template is not one that gyre can continue."""
    folder = Path(policy_dir)
    config = _read_json(folder / "tokenizer_config.json")
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    if not isinstance(template, str):
        raise PolicyError(f"{folder}: there is no chat template: add chat_template.jinja")
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise PolicyError(f"{tokenizer_file}: missing: make the policy with `gyre policy init` or copy it whole")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing narrower
        raise PolicyError(f"{tokenizer_file}: not a tokenizer: {error}: copy the policy again") from None
    tokens = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS}
    special_tokens = {name: text for name, text in tokens.items() if text is not None}
    if "eos_token" not in special_tokens:
        raise PolicyError(f"{folder / 'tokenizer_config.json'}: no eos_token: set it to the end of a turn")
    return Renderer(
        tokenizer,
        template,
        end_of_turn=special_tokens["eos_token"],
        special_tokens=special_tokens,
        source=str(folder),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError:
        raise PolicyError(f"{path}: missing: make the policy with `gyre policy init` or copy it whole") from None
    except ValueError:
        raise PolicyError(f"{path}: not JSON: copy the policy again") from None
    if not isinstance(value, dict):
        raise PolicyError(f"{path}: expected an object: copy the policy again")
    return value


def _token_text(token: Any) -> str | None:
    """A token is written as text or as {"content": text, ...}."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
