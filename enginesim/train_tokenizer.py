"""Makes `model/tokenizer.json`: a byte-level BPE of 8192 tokens, trained on the Python standard library.

    python -m enginesim.train_tokenizer [FILE]

The same Python version gives the same file: sources are read in sorted order, and the trainer breaks ties by token id.
The shipped file was made with CPython 3.11 (PSF licence), whose prose is in `pydoc_data/topics.py` and the docstrings.
"""

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

VOCABULARY_TOKENS = 8192
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Third-party packages have licences of their own; tests and generated tables hold little language.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


def standard_library_texts() -> Iterator[str]:
    """Every readable source of the running Python's standard library, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="ignore")


def train() -> str:
    """The content of `tokenizer.json`, as compact as JSON allows."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(standard_library_texts(), trainer)
    described = json.loads(tokenizer.to_str())
    described["model"]["merges"] = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]
    ]
    return json.dumps(described, ensure_ascii=False, separators=(",", ":")) + "\n"


def main() -> None:
    """Write the tokenizer to the file named on the command line, or into the package."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "model" / "tokenizer.json"
    target.write_text(train(), encoding="utf-8")


if __name__ == "__main__":
    main()
