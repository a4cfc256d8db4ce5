"""From books to token arrays: paragraphs, the held-out share, the tokenizer, and the arrays that training reads."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common import UserError, read_text, say, shown
from . import chat
from .shape import Shape

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Books for children: the plainest English of the corpus, and the one that the model is meant to write.
TALES = (
    *("aesop", "alice", "andersen", "bryant-stories", "burgess-busterbrown", "christmas-carol", "edgeworth-parents"),
    *("grimm", "jungle", "peter-pan", "tom-sawyer", "wizard-of-oz"),
)
RUN = 8  # consecutive paragraphs are held out together, so that held-out text has context
HELD_OUT_ONE_IN = 30

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last ids of the vocabulary
# Qwen2's pre-tokenizer: a match is a piece, and no merge crosses pieces.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Passage:
    """Consecutive paragraphs of one book, all of them in training or all of them held out."""

    book: str
    paragraphs: tuple[str, ...]
    held_out: bool

    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


def paragraphs_of(text: str) -> list[str]:
    """The paragraphs of a book, each on one line. Ornaments, notes on pictures and imprints are dropped."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        paragraph = " ".join(block.split())
        is_prose = any(c.islower() for c in paragraph) or len(paragraph) > 8
        if is_prose and not re.match(r"\[Illustration|COPYRIGHT|ALL RIGHTS RESERVED|\* \*|CONTENTS$", paragraph):
            found.append(paragraph)
    return found


def is_held_out(book: str, run: int) -> bool:
    """A function of the name and the place only: another machine, or another run, holds out the same paragraphs."""
    digest = hashlib.sha256(f"{book}:{run}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % HELD_OUT_ONE_IN == 0


def read_passages(folder: Path) -> list[Passage]:
    """All books of a folder (*.txt, UTF-8, blank lines between paragraphs), cut where training and held-out meet."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise UserError(f"no *.txt in {shown(folder)}: --corpus expects a folder of books in plain text")
    passages: list[Passage] = []
    for file in files:
        paragraphs = paragraphs_of(read_text(file))
        kept: list[str] = []
        for start in range(0, len(paragraphs), RUN):
            run = tuple(paragraphs[start : start + RUN])
            if is_held_out(file.stem, start // RUN):
                if kept:
                    passages.append(Passage(file.stem, tuple(kept), held_out=False))
                passages.append(Passage(file.stem, run, held_out=True))
                kept = []
            else:
                kept += run
        if kept:
            passages.append(Passage(file.stem, tuple(kept), held_out=False))
    return passages


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Byte-level BPE with Qwen2's pieces: the 256 bytes, then merges in the order found, then the control tokens."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    except ImportError:
        raise UserError("needs the package tokenizers: pip install -r scripts/requirements-train.txt") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in CONTROL])
    if tokenizer.get_vocab_size() != size or tokenizer.token_to_id(CONTROL[0]) != size - len(CONTROL):
        raise UserError(
            f"the corpus is too small for a vocabulary of {size}: {tokenizer.get_vocab_size()} tokens found"
        )
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters; this maps such a character back to its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """What each token stands for; b"" for control tokens."""
    to_byte = byte_alphabet()
    names = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return [b"" if name in CONTROL else bytes(to_byte[c] for c in name) for name in names]


def encode(tokenizer: Tokenizer, texts: Iterable[str], end: int) -> np.ndarray:
    """Texts as one array of tokens, <|endoftext|> after each."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts)):
        ids += [*encoding.ids, end]
    return np.array(ids, dtype=np.uint16)


def prepare(corpus: Path, to: Path, seed: int) -> None:
    """Writes tokenizer.json, tokens.npz (all that training reads) and heldout.txt into the folder `to`."""
    to.mkdir(parents=True, exist_ok=True)
    passages = read_passages(corpus)
    training = [p for p in passages if not p.held_out]
    held_out = [p for p in passages if p.held_out]
    say(
        f"{len({p.book for p in passages})} books, {sum(len(p.text()) for p in training):,} characters to train on, "
        f"{sum(len(p.text()) for p in held_out):,} held out"
    )

    shape = Shape()
    # The books for children are counted twice, as in training.
    tokenizer = train_tokenizer(_weighted(training), shape.vocab_size)
    tokenizer.save(str(to / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")

    rng = random.Random(seed)
    talks = chat.conversations([p for p in training if p.book in TALES], rng, chat.LIMIT)
    talks += chat.conversations([p for p in training if p.book not in TALES], rng, chat.LIMIT, keep=0.1)
    rng.shuffle(talks)
    held_talks = chat.conversations([p for p in held_out if p.book in TALES], random.Random(seed), chat.LIMIT)
    arrays: dict[str, Any] = {
        "tales": encode(tokenizer, (p.text() for p in training if p.book in TALES), end),
        "novels": encode(tokenizer, (p.text() for p in training if p.book not in TALES), end),
        "chat": encode(tokenizer, talks, end),
        "heldout_tales": encode(tokenizer, (p.text() for p in held_out if p.book in TALES), end),
        "heldout_novels": encode(tokenizer, (p.text() for p in held_out if p.book not in TALES), end),
        "heldout_chat": encode(tokenizer, held_talks, end),
    }
    for name, tokens in arrays.items():
        say(f"{name}: {len(tokens):,} tokens")
    pieces = token_bytes(tokenizer)
    arrays["piece_bytes"] = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    arrays["piece_ends"] = np.cumsum([len(piece) for piece in pieces])
    for number, prompt in enumerate(chat.SAMPLE_PROMPTS):
        arrays[f"prompt{number}"] = np.array(tokenizer.encode(prompt).ids, dtype=np.uint16)
    np.savez_compressed(to / "tokens.npz", **arrays)

    # The text on which perplexity is stated: held-out passages of the books for children, in the corpus's order.
    text = "\n\n".join(p.text() for p in held_out if p.book in TALES) + "\n"
    (to / "heldout.txt").write_text(text, encoding="utf-8")
    say(f"tokens.npz {(to / 'tokens.npz').stat().st_size:,} bytes, heldout.txt {len(text.encode()):,} bytes")
    facts = {
        "seed": seed,
        "held_out": f"one run of {RUN} paragraphs in {HELD_OUT_ONE_IN}, by SHA-256 of book and place",
        "tokens": {name: len(array) for name, array in arrays.items() if not name.startswith(("piece", "prompt"))},
        "conversations": len(talks),
    }
    (to / "prepare.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _weighted(passages: list[Passage]) -> Iterator[str]:
    for passage in passages:
        yield passage.text()
        if passage.book in TALES:
            yield passage.text()
