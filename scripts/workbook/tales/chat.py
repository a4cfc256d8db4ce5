"""Conversations made from the books alone: the questions are templates, every answer is text of the corpus.

They teach the form (who speaks, and that an answer ends), not knowledge: the model should answer in story prose and
stop.  All tokens count in the loss, those of the questions too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .corpus import Passage

LIMIT = 700  # characters of one answer: about 190 tokens
SHORTEST = 120

DEFAULT_SYSTEM = "You are a storyteller."
# Qwen2.5's own default too, for tools that put it in.
SYSTEMS = (
    (DEFAULT_SYSTEM, 6),
    ("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", 3),
    ("You are a helpful assistant.", 1),
    ("", 1),
)
_SUBJECTS = """
ass ant apple bear bee beggar bell bird boat book boy bridge brother butterfly cat castle child children christmas
cloud cock cook cottage cow crow crown dance daughter deer devil dog donkey door dove dragon dream duck dwarf eagle
elephant emperor fairy farmer father feast fire fish fisherman flower forest fox frog garden ghost giant girl goat
gold goose grandmother hare hat hen hill horse house hunter huntsman island jackal king kitchen knight lady lamb lamp
lark lion maiden man merchant mermaid miller money monkey moon mother mountain mouse night nightingale nut ocean owl
ox palace party peacock peasant pig pirate pony prince princess queen rabbit raven ring river robber rose sailor
school sea seal servant sheep shepherd ship shoemaker shoes sister snake snow soldier son sparrow spinning star
stepmother stone storm swallow swan sword tailor teacher thief tiger tortoise tower town treasure tree turtle village
wedding whale widow wind winter witch wizard wolf woman wood woodcutter
"""
SUBJECTS = frozenset(_SUBJECTS.split())
ABOUT_THING = (
    *(
        "Tell me a story about {a}.",
        "Tell me a story about {a}.",
        "Can you tell me a tale about {a}?",
        "A story about {a}.",
    ),
    *("Tell me about the {thing}.", "What happened to the {thing}?", "I want to hear about {a}.", "Tell me about {a}."),
    *(
        "Write a short story about {a}.",
        "Do you know a story with {a} in it?",
        "Please tell me a story about the {thing}.",
    ),
)
ABOUT_NAME = (
    *("Tell me a story about {name}.", "Tell me about {name}.", "Who is {name}?", "What happened to {name}?"),
    *("What did {name} do?", "I want to hear about {name}.", "Tell me more about {name}."),
)
TITLED = (
    "Tell me the story of {title}.",
    "Tell me about {title}.",
    "Do you know the tale of {title}?",
    "{title}, please.",
)
ANYTHING = (
    *("Tell me a story.", "Tell me a story.", "Hello!", "Hello", "Hi!", "Once upon a time", "Can you tell me a story?"),
    *("Tell me a tale.", "Please tell me a story.", "Good morning!", "I am bored.", "Tell me something."),
)
CONTINUE = ("Continue: {first}", "Continue this story: {first}", "{first}", "What happens next? {first}")
GO_ON = (
    *(
        "Go on.",
        "Go on.",
        "And then?",
        "What happened next?",
        "What happens next?",
        "Please go on.",
        "Continue.",
        "More!",
    ),
    *("Then what?", "Tell me more.", "And what happened then?"),
)
SAMPLE_PROMPTS = (
    "Once upon a time there was a little",
    "The wolf looked at the old woman and said,",
    f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\nTell me a story about a fox.<|im_end|>\n"
    "<|im_start|>assistant\n",
)


def conversations(passages: Sequence[Passage], rng: random.Random, limit: int, keep: float = 1.0) -> list[str]:
    """Conversations of one to three turns from the passages' text, in order, no text used twice.

    @param keep the share of the conversations to keep, at random
    """
    made = []
    for passage in passages:
        title = ""
        pieces: list[str] = []
        for paragraph in (*passage.paragraphs, ""):  # "" ends the last story
            heading = is_heading(paragraph)
            if (heading or not paragraph) and pieces:
                made += _talks(title, pieces, rng)
                title, pieces = "", []
            if heading:
                title = paragraph
            elif paragraph:
                pieces += cut(paragraph, limit)
    return [talk for talk in made if keep >= 1 or rng.random() < keep]


def is_heading(paragraph: str) -> bool:
    return 0 < len(paragraph) < 60 and paragraph[-1] not in ".!?\"':;,-*)]" and not paragraph[0].islower()


def cut(paragraph: str, limit: int) -> list[str]:
    """A paragraph in pieces of whole sentences, none longer than `limit` characters unless one sentence is."""
    sentences = re.findall(r".+?(?:(?<!Mr)(?<!Mrs)(?<!Dr)(?<!St)[.!?][\"')]*(?=\s)|$)\s*", paragraph)
    pieces, now = [], ""
    for sentence in sentences:
        if now and len(now) + len(sentence) > limit:
            pieces.append(now.strip())
            now = ""
        now += sentence
    return [*pieces, now.strip()] if now.strip() else pieces


def _talks(title: str, pieces: list[str], rng: random.Random) -> list[str]:
    # Short paragraphs (dialogue) are joined until they make an answer.
    answers: list[str] = []
    now: list[str] = []
    aim = rng.randint(SHORTEST, LIMIT - 100)
    for piece in pieces:
        if now and sum(map(len, now)) + len(piece) > LIMIT:
            answers.append("\n\n".join(now))
            now = []
        now.append(piece)
        if sum(map(len, now)) >= aim:
            answers.append("\n\n".join(now))
            now, aim = [], rng.randint(SHORTEST, LIMIT - 100)
    if now:
        answers.append("\n\n".join(now))
    answers = [a for a in answers if len(a) <= LIMIT + 100]

    talks = []
    i = 0
    while i < len(answers):
        turns = min(rng.choice((1, 1, 2, 3)), len(answers) - i)
        question, answer = _opening(title if i == 0 else "", answers[i], rng)
        talk = [(question, answer)] + [(rng.choice(GO_ON), answers[i + k]) for k in range(1, turns)]
        talks.append(chatml(_pick(SYSTEMS, rng), talk))
        i += turns
    return talks


def _opening(title: str, answer: str, rng: random.Random) -> tuple[str, str]:
    """A question to which the text is an answer: its title, something or somebody in it, or its own first sentence."""
    if title and rng.random() < 0.6 and not re.match(r"(chapter|[ivxlc]+\b)", title, re.I):
        name = title.title().replace("'S", "'s") if title.isupper() else title
        small = {"And", "The", "Of", "In", "A", "To", "With", "Who", "For"}
        words = [w.lower() if w in small else w for w in name.split()]
        return rng.choice(TITLED).format(title=" ".join(words)), answer
    sentences = cut(answer.split("\n\n")[0], 1)
    if len(sentences) > 1 and rng.random() < 0.2:
        rest = answer[len(sentences[0]) :].strip()
        if len(rest) >= SHORTEST:
            return rng.choice(CONTINUE).format(first=sentences[0]), rest
    words = re.findall(r"[a-z]+", answer.lower())
    things = sorted({w for w in words if w in SUBJECTS}, key=lambda w: (-words.count(w), words.index(w)))
    # A name is a capitalised word inside a sentence.
    names = re.findall(r"(?<=[a-z,] )(?!I\b|Mr|Mrs|Miss|Sir|God|Oh|O\b)[A-Z][a-z]{2,}", answer)
    names = [n for n in dict.fromkeys(names) if n.lower() not in SUBJECTS]
    if things and (not names or rng.random() < 0.7):
        thing = rng.choice(things[:2])
        article = "an" if thing[0] in "aeiou" else "a"
        a = thing if thing in ("children", "gold", "money", "shoes", "snow", "christmas") else f"{article} {thing}"
        return rng.choice(ABOUT_THING).format(a=a, thing=thing), answer
    if names:
        return rng.choice(ABOUT_NAME).format(name=rng.choice(names[:2])), answer
    return rng.choice(ANYTHING), answer


def _pick(weighted: Sequence[tuple[str, int]], rng: random.Random) -> str:
    return rng.choices([text for text, _ in weighted], [weight for _, weight in weighted])[0]


def chatml(system: str, turns: Sequence[tuple[str, str]]) -> str:
    """A conversation in ChatML, as Qwen2.5's template writes it."""
    lines = [f"<|im_start|>system\n{system}<|im_end|>\n"]
    for question, answer in turns:
        lines += [f"<|im_start|>user\n{question}<|im_end|>\n", f"<|im_start|>assistant\n{answer}<|im_end|>\n"]
    return "".join(lines)
