"""Shell. Makes the tiny policy: a random Llama of 1.1M parameters with a tokenizer of its own, in Hugging Face format.

(seed, family) -> policy directory. The same seed gives the same bytes. The directory appears whole or not at all.
The tokenizer is a byte-level BPE whose pre-split keeps a file name in one piece, so that copying a name is one
step; the JSON frame of a tool call is one piece too. The chat template is ChatML that leaves the tools list out of
the prompt, to keep it short: this policy knows its one tool from its demonstrations. It has no system turn.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gyre.agents.renderer import Renderer
from gyre.errors import PolicyError
from gyre.workers.demonstrations import make_demonstration, make_messages

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# The frame of a call, then words with the space before them, then single quotes and white space.
_PIECES = r'\n\{"name": "bash", "arguments": \{"command": "|"\}\}\n| ?[^\s"]+|"|\s'

CHAT_TEMPLATE = Path(__file__).with_name("tiny_chat_template.jinja").read_text()


class TinyShape(msgspec.Struct, frozen=True, kw_only=True):
    num_layers: int = 3
    hidden: int = 192
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    ffn: int = 384
    vocab: int = 640
    context: int = 2048


SHAPES: dict[str, TinyShape] = {
    "tiny": TinyShape(),
    "small": TinyShape(num_layers=4, hidden=256, num_heads=8, ffn=576),
}
"""1.1 and 2.6 million parameters: what `gyre policy init --size` offers."""


def init_policy(
    directory: Path | str,
    seed: int,
    *,
    family: str = "files",
    num_demonstrations: int = 2000,
    shape: TinyShape | None = None,
) -> str:
    """Write a random policy to `directory`, which must not exist yet; returns its digest.

    The tokenizer is trained on demonstrations of `family`. Raises PolicyError when the directory exists.
    """
    shape = shape or TinyShape()
    tokenizer = train_tokenizer(family, seed, num_demonstrations, shape.vocab)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    target = Path(directory)
    if target.exists():
        raise PolicyError(f"{target}: exists already: remove it or choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_tokenizer(made, tokenizer, shape.context)
        _write_json(made / "config.json", config)
        generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(made / "generation_config.json", generation)
        save_file(_draw_weights(shape, seed), made / "model.safetensors", metadata={"format": "pt"})
        for file in made.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        made.chmod(0o755)
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return policy_digest(target)


def policy_digest(directory: Path | str) -> str:
    """Of every file of a policy: names and bytes. Raises PolicyError when there is none."""
    files = sorted(path for path in Path(directory).glob("*") if path.is_file() and not path.name.startswith("."))
    if not files:
        raise PolicyError(f"{directory}: no policy there: make one with `gyre policy init`")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as opened:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def train_tokenizer(family: str, seed: int, num_demonstrations: int, vocab: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab` ids; ChatML's and the tool calls' markup are single ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markup = [PAD, TURN_START, TURN_END, *MARKUP]
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in markup],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(tokenizer, markup, family, seed, num_demonstrations), trainer)
    # A trainer makes all of them special; as in Qwen, the markup of tools must survive a decode that drops specials.
    tree = json.loads(tokenizer.to_str())
    for token in tree["added_tokens"]:
        token["special"] = token["content"] not in MARKUP
    return Tokenizer.from_str(json.dumps(tree))


def _texts(tokenizer: Tokenizer, markup: list[str], family: str, seed: int, num_demonstrations: int) -> Iterable[str]:
    """Demonstrations without their markup: it is never part of a merge."""
    blank = Tokenizer(models.BPE())
    blank.add_special_tokens(markup)
    renderer = Renderer(blank, CHAT_TEMPLATE)
    for index in range(num_demonstrations):
        text = renderer.render_text(make_messages(make_demonstration(family, seed, index, 2, noise=0.5)), (), False)
        for token in markup:
            text = text.replace(token, "\0")
        yield from filter(None, text.split("\0"))


def _draw_weights(shape: TinyShape, seed: int) -> dict[str, NDArray[np.float32]]:
    """Normal with deviation 0.02; what writes to the residual stream is scaled by its depth. Axes: [out, in]."""
    rng = np.random.default_rng(seed)
    q, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    into_stream = 0.02 / (2 * shape.num_layers) ** 0.5

    def draw(rows: int, columns: int, deviation: float = 0.02) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * deviation).astype(np.float32)

    ones = np.ones(shape.hidden, dtype=np.float32)
    weights = {"model.embed_tokens.weight": draw(shape.vocab, shape.hidden), "model.norm.weight": ones.copy()}
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}self_attn.q_proj.weight": draw(q, shape.hidden),
            f"{at}self_attn.k_proj.weight": draw(kv, shape.hidden),
            f"{at}self_attn.v_proj.weight": draw(kv, shape.hidden),
            f"{at}self_attn.o_proj.weight": draw(shape.hidden, q, into_stream),
            f"{at}mlp.gate_proj.weight": draw(shape.ffn, shape.hidden),
            f"{at}mlp.up_proj.weight": draw(shape.ffn, shape.hidden),
            f"{at}mlp.down_proj.weight": draw(shape.hidden, shape.ffn, into_stream),
            f"{at}input_layernorm.weight": ones.copy(),
            f"{at}post_attention_layernorm.weight": ones.copy(),
        }
    return weights


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
