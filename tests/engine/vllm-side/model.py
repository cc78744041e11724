"""Writes a model folder: the simulator's tokenizer and chat template, and the config of a Qwen3 that computes next to
nothing. There are no weights; the engine makes some up (`--load-format dummy`).
"""

import json
import shutil
import sys
from pathlib import Path

CONTEXT_TOKENS = 131_072
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    """The two arguments are the tokenizer's folder and the one to write."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, target / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    end = special[json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]]
    ids = [*tokenizer["model"]["vocab"].values(), *special.values()]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": max(ids) + 1,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "torch_dtype": "bfloat16",
    }
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), encoding="utf-8")


main()
