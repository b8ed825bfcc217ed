"""Chats for `--sft`, and a tokenizer of bytes for them, with the special tokens of upstream's prompt formats."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<unk>", "<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]


def write_tokenizer(folder: Path) -> str:
    """A Hugging Face tokenizer of 263 tokens; returns its folder."""
    transformers = __import__("transformers")
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<unk>", "additional_special_tokens": SPECIAL[3:]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return str(folder)


def conversation(answers: list[int], seed: int = 0) -> list[dict[str, str]]:
    """Questions and answers; the answers have so many letters."""
    rng = np.random.default_rng(seed)

    def text(length: int) -> str:
        return "".join(chr(97 + k) for k in rng.integers(0, 26, length))

    turns = [
        [{"role": "user", "content": text(int(rng.integers(1, 20)))}, {"role": "assistant", "content": text(length)}]
        for length in answers
    ]
    return [{"role": "system", "content": text(5)}, *(message for turn in turns for message in turn)]


def write_chats(path: Path, rows: list[list[dict[str, str]]]) -> str:
    """A row of messages a line; returns the path."""
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)
