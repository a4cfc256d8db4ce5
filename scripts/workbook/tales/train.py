"""Token arrays -> weights, in a given time.

Four million tokens are few for ten million parameters: without care the model learns the books by heart. Against that:
dropout, a strong weight decay, and a choice by held-out loss, over the course of a run and between runs.  At the end a
student learns from the earlier runs: besides the next token, it is shown the mean of the distributions that they
predict, which says more about each position than one token does, and so it can be trained for longer before it
overfits (the recipe of BabyLlama, https://arxiv.org/abs/2308.02019).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common import StepFailed, UserError, say, shown
from .model import Qwen2
from .shape import Shape

# Shares of the sequences that come from each array. A token of a book for children is drawn twice as often as one of a
# novel, and an eighth of all sequences are conversations.
CHAT_SHARE = 0.125
TALES_WEIGHT = 2
TRAINED, HELD_OUT = ("tales", "novels", "chat"), ("heldout_tales", "heldout_novels", "heldout_chat")
LARGEST_PART = 15_000_000  # bytes of one file of weights
EVALUATIONS = 24  # per run


@dataclass(frozen=True)
class Run:
    dropout: float
    epochs: float
    distilled: bool = False

    def cost(self, teachers: int) -> float:
        """Time, in epochs without a teacher: a teacher's forward pass is a third of a training step."""
        return self.epochs * (1 + teachers / 3 if self.distilled else 1)


@dataclass
class Outcome:
    run: Run
    weights: dict[str, Tensor]
    losses: dict[str, float]  # held-out loss by array, "mean" is what choices go by
    curve: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0


class Data:
    """The arrays on the device; a batch is sequences that begin anywhere."""

    def __init__(self, file: Path, device: torch.device, rows: int, length: int) -> None:
        try:
            with np.load(file) as arrays:
                self.arrays = {name: arrays[name] for name in arrays.files}
        except OSError as error:
            raise UserError(f"cannot read {shown(file)}: {error}; make it with prepare") from None
        self.device, self.rows, self.length = device, rows, length
        self.tokens = {n: torch.from_numpy(self.arrays[n].astype(np.int64)).to(device) for n in (*TRAINED, *HELD_OUT)}
        tales, novels = (len(self.tokens[name]) for name in ("tales", "novels"))
        self.share = torch.tensor([TALES_WEIGHT * tales, novels, 0.0])
        self.share *= (1 - CHAT_SHARE) / self.share.sum()
        self.share[2] = CHAT_SHARE
        self.epoch_tokens = (TALES_WEIGHT * tales + novels) / (1 - CHAT_SHARE)
        # One array of all, so that a batch is one gather.
        self.all = torch.cat([self.tokens[name] for name in TRAINED])
        sizes = torch.tensor([len(self.tokens[name]) for name in TRAINED])
        if int(sizes.min()) <= length + 1:
            raise UserError(f"{shown(file)}: an array is shorter than one sequence of {length} tokens")
        self.first, self.choices = sizes.cumsum(0) - sizes, sizes - length

    def batch(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tokens, next tokens), [rows, length] each."""
        source = torch.multinomial(self.share, self.rows, replacement=True, generator=rng)
        start = self.first[source] + (torch.rand(self.rows, generator=rng) * self.choices[source]).long()
        start = start.to(self.device, non_blocking=True)
        window = self.all[start[:, None] + torch.arange(self.length + 1, device=self.device)]
        return window[:, :-1], window[:, 1:]

    def held_out(self, name: str) -> tuple[Tensor, Tensor]:
        """A whole held-out array as rows; -100 marks padding."""
        tokens = self.tokens[name]
        rows = math.ceil((len(tokens) - 1) / self.length)
        padded = torch.full((rows * self.length + 1,), -100, device=self.device)
        padded[: len(tokens)] = tokens
        return padded[:-1].view(rows, -1).clamp(min=0), padded[1:].view(rows, -1)

    def text(self, ids: list[int]) -> str:
        ends, data = self.arrays["piece_ends"], self.arrays["piece_bytes"]
        pieces = [data[ends[i - 1] if i else 0 : ends[i]].tobytes() for i in ids]
        return b"".join(pieces).decode("utf-8", "replace")


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16)


@torch.no_grad()
def evaluate(model: Qwen2, data: Data) -> dict[str, float]:
    """Mean loss per token (nats) of each held-out array, and the mean of the three."""
    model.eval()
    losses = {}
    for name in HELD_OUT:
        inputs, targets = data.held_out(name)
        total = torch.zeros((), device=data.device)
        for i in range(0, len(inputs), data.rows):
            with autocast(data.device):
                logits = model(inputs[i : i + data.rows])
            total += F.cross_entropy(
                logits.float().flatten(0, 1), targets[i : i + data.rows].flatten(), ignore_index=-100, reduction="sum"
            )
        losses[name.removeprefix("heldout_")] = total.item() / int((targets >= 0).sum())
    model.train()
    return losses | {"mean": sum(losses.values()) / len(losses)}


def optimizer(model: Qwen2, rate: float, decay: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def rate_at(progress: float) -> float:
    """Share of the peak learning rate: 3 % warm-up, then a cosine to zero."""
    if progress < 0.03:
        return (progress + 0.001) / 0.031
    return 0.5 * (1 + math.cos(math.pi * (progress - 0.03) / 0.97))


class Objective(nn.Module):
    """What is minimized for a batch, and the plain loss: model, guides and losses in one graph for the compiler."""

    def __init__(self, model: Qwen2, guides: list[Qwen2]) -> None:
        super().__init__()
        self.model, self.guides = model, nn.ModuleList(guides)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(inputs.device):
            logits = self.model(inputs)
        logits = logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten())
        if not len(self.guides):
            return loss, loss.detach()
        with torch.no_grad(), autocast(inputs.device):
            expected = sum(guide(inputs).flatten(0, 1).float().softmax(-1) for guide in self.guides) / len(self.guides)
        return 0.5 * loss + 0.5 * F.cross_entropy(logits, expected), loss.detach()


def compiled(objective: Objective, data: Data) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The objective through torch.compile, tried once, forwards and backwards; the objective itself if that fails."""
    began = time.monotonic()
    fast = torch.compile(objective, dynamic=False)
    inputs, targets = data.batch(torch.Generator().manual_seed(0))
    try:
        fast(inputs, targets)[0].backward()
    except Exception as error:  # whatever the compiler or its back end raise: training goes on without them
        reason = " ".join(str(error).split())[:200]
        say(f"  torch.compile failed ({type(error).__name__}: {reason}); this run goes on without it")
        torch.compiler.reset()
        return objective
    finally:
        objective.model.zero_grad(set_to_none=True)
    say(f"  compiled in {time.monotonic() - began:.0f} s")
    return fast


def train_once(run: Run, data: Data, options: argparse.Namespace, seconds: float, teachers: list[Outcome]) -> Outcome:
    """One run. It ends after its epochs or its seconds, whichever come first; the learning rate follows that clock.

    Compiling counts in the seconds, but the clock starts after it, so that the warm-up is not skipped.
    """
    entered = time.monotonic()
    device, shape = data.device, Shape()
    torch.manual_seed(options.seed + round(1000 * run.dropout) + run.distilled)
    rng = torch.Generator().manual_seed(options.seed)
    model = Qwen2(shape, run.dropout).to(device)
    adam = optimizer(model, options.rate, options.decay)
    guides = []
    for teacher in teachers if run.distilled else []:
        guide = Qwen2(shape, 0.0).to(device).eval().requires_grad_(False)
        guide.load_state_dict(teacher.weights)
        guides.append(guide)

    objective = Objective(model, guides)
    evaluate_objective = compiled(objective, data) if options.compile else objective

    began = last_said = time.monotonic()
    seconds = max(1.0, seconds - (began - entered))
    best = Outcome(run, {}, {"mean": math.inf})
    step, next_evaluation, progress = 0, 1.0 / EVALUATIONS, 0.0
    per_step = options.rows * options.length
    while progress < 1:
        for group in adam.param_groups:
            group["lr"] = options.rate * rate_at(progress)
        inputs, targets = data.batch(rng)
        total, loss = evaluate_objective(inputs, targets)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        step += 1

        if step % 10 == 0 or device.type == "cpu":
            value = loss.item()  # waits for the device, so that the clock below is true
            if not math.isfinite(value):
                say(f"  the loss is {value} after {step} steps: this run stops here")
                break
        elapsed = time.monotonic() - began
        progress = max(step * per_step / (run.epochs * data.epoch_tokens), elapsed / seconds)
        if progress >= min(next_evaluation, 1.0):
            next_evaluation = progress + 1.0 / EVALUATIONS
            held_out = evaluate(model, data)
            point = {"step": step, "seconds": round(elapsed, 1), "train": loss.item(), **held_out}
            best.curve.append({name: round(x, 4) for name, x in point.items()})
            if held_out["mean"] < best.losses["mean"]:
                best.losses = held_out
                best.weights = {name: p.detach().clone() for name, p in model.state_dict().items()}
        if best.curve and (time.monotonic() - last_said > 10 or progress >= 1):
            last_said = time.monotonic()
            point = best.curve[-1]
            say(f"  {elapsed:5.0f} s  step {step}  epoch {step * per_step / data.epoch_tokens:.1f}  "
                f"{step * per_step / elapsed / 1e6:.2f} M tokens/s  loss {point['train']:.3f}  held-out "
                + "  ".join(f"{name} {point[name]:.3f}" for name in ("tales", "novels", "chat"))
                + f"  best mean {best.losses['mean']:.4f}")  # fmt: skip
    best.seconds = time.monotonic() - entered
    return best


@torch.no_grad()
def sample(model: Qwen2, data: Data, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """Up to `count` tokens, to the first control token; temperature 0 takes the most probable token."""
    rng = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids], device=data.device))[0, -1].float().cpu()
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)))
        if ids[-1] >= model.shape.vocab_size - 3:
            break
    return ids[len(prompt) :]


def write_weights(weights: dict[str, Tensor], folder: Path) -> list[Path]:
    """tales-weights-0.npz, -1.npz, ...: f16 matrices and f32 vectors under Hugging Face's names, 15 MB a file."""
    parts: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in weights.items():
        values = tensor.float().cpu().numpy()
        array = values.astype(np.float16) if values.ndim == 2 else values
        if sum(a.nbytes for a in parts[-1].values()) + array.nbytes > LARGEST_PART:
            parts.append({})
        parts[-1][name] = array
    files = []
    for number, part in enumerate(parts):
        files.append(folder / f"tales-weights-{number}.npz")
        np.savez(files[-1], **part)
    return files


def parse_run(text: str, distilled: bool = False) -> Run:
    try:
        dropout, epochs = (float(part) for part in text.split(":"))
    except ValueError:
        raise UserError(f'"{text}" is no run: expected DROPOUT:EPOCHS, as in 0.2:24') from None
    if not 0 <= dropout < 1 or epochs <= 0:
        raise UserError(f'"{text}" is no run: dropout must be in [0, 1) and epochs above 0')
    return Run(dropout, epochs, distilled)


def train(options: argparse.Namespace) -> None:
    """Makes the runs, keeps the best, writes weights and tales-training.json, prints samples."""
    began = time.monotonic()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_float32_matmul_precision("high")
    runs = [parse_run(text) for text in options.runs]
    if options.student != "none":
        runs.append(parse_run(options.student, distilled=True))
    data = Data(options.tokens, device, options.rows, options.length)
    options.out.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    say(f"{machine}, torch {torch.__version__}, {data.epoch_tokens / 1e6:.2f} M tokens an epoch")

    outcomes: list[Outcome] = []
    for number, run in enumerate(runs):
        # What is left of the time is divided by cost, so that an early end of one run is the others' gain.
        left = options.seconds - (time.monotonic() - began)
        costs = [r.cost(len(options.runs)) for r in runs[number:]]
        if left <= 0:
            say("no time is left for the remaining runs")
            break
        seconds = left * costs[0] / sum(costs)
        kind = "student of the runs before" if run.distilled else "run"
        say(f"{kind}: dropout {run.dropout}, {run.epochs:g} epochs or {seconds:.0f} s")
        outcome = train_once(run, data, options, seconds, outcomes)
        if outcome.weights:
            outcomes.append(outcome)
    if not outcomes:
        raise StepFailed("no run came to an evaluation: more --seconds are needed")

    best = min(outcomes, key=lambda o: o.losses["mean"])
    model = Qwen2(Shape(), 0.0).to(device).eval()
    # What is written is rounded to f16, and so is what is stated.
    model.load_state_dict({n: w.half().float() if w.ndim == 2 else w for n, w in best.weights.items()})
    losses = evaluate(model, data)
    files = write_weights(model.state_dict(), options.out)
    record = {
        "shape": Shape().as_dict(),
        "options": {n: getattr(options, n) for n in ("seconds", "rows", "length", "rate", "decay", "seed", "compile")},
        "epoch_tokens": round(data.epoch_tokens),
        "runs": [
            {"dropout": o.run.dropout, "epochs": o.run.epochs, "distilled": o.run.distilled,
             "seconds": round(o.seconds, 1), "held_out": o.losses, "curve": o.curve}
            for o in outcomes
        ],
        "chosen": outcomes.index(best),
        "held_out_perplexity": {name: round(math.exp(loss), 3) for name, loss in losses.items()},
        "seconds": round(time.monotonic() - began, 1),
        "device": machine,
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
    }  # fmt: skip
    (options.out / "tales-training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    say(f"chosen: run {record['chosen']}; held-out perplexity (f16 weights) {record['held_out_perplexity']}")
    say("written: " + ", ".join(f"{f.name} {f.stat().st_size:,} bytes" for f in files))

    model.eval()
    prompts = [name for name in data.arrays if name.startswith("prompt")]
    for name in prompts:
        prompt = data.arrays[name].tolist()
        for temperature in (0.0, 0.7):
            ids = sample(model, data, prompt, 120, temperature, options.seed)
            stop = f" [stops at token {ids[-1]}]" if ids[-1] >= Shape().vocab_size - 3 else ""
            print(f"--- temperature {temperature}: {data.text(prompt)}|{data.text(ids)}{stop}", flush=True)
