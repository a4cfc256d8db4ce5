"""Measuring a whole model: speed by `qwen bench`, quality by `qwen perplexity`, and how fast weights reach a GPU, as
records of rung "engine"."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import shlex
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import build, devices, records, run
from .common import ROOT, StepFailed, UserError, json_lines, markdown_table, say, shown
from .records import Record

MODELS = build.BUILD / "models"  # made for a measurement, kept for the next one
CHAPTER = "09-qwen"


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="+",
        metavar="MODEL",
        help="FILE.gguf; FILE.gguf:TYPE, which is quantized first; or SIZE:TYPE (0.5b:Q4_0), made of random weights",
    )
    parser.add_argument(
        "--on", choices=("gpu", "cpu", "emulator"), help="where to run (default: the GPU if there is one, else the CPU)"
    )
    parser.add_argument(
        "-p", "--n-prompt", default="512", metavar="N,..", help="tokens of prompts (default 512; 0: none)"
    )
    parser.add_argument(
        "-n", "--n-gen", default="128", metavar="N,..", help="tokens to generate (default 128; 0: none)"
    )
    parser.add_argument("-d", "--n-depth", default="0", metavar="N,..", help="tokens in the cache before (default 0)")
    parser.add_argument(
        "-r", "--repetitions", type=run.positive, default=5, metavar="N", help="runs of a test (default 5)"
    )
    parser.add_argument("--perplexity", type=Path, metavar="TEXT", help="perplexity on a text instead of speed")
    parser.add_argument(
        "--load",
        action="store_true",
        help="the time of loading onto a GPU instead: from the page cache, and from the disk",
    )
    parser.add_argument("--runs", type=Path, metavar="DIR", help="add the records to this folder, such as data/runs")
    run.add_build_options(parser)
    parser.set_defaults(do=command_engine)


def command_engine(args: argparse.Namespace) -> int:
    if args.load and args.on != "gpu":
        raise UserError("--load measures how fast weights reach a GPU: it needs --on gpu")
    folder = run.prepare(args)
    program = build.built_qwen(folder, args.on)
    if args.perplexity and not args.perplexity.is_file():
        raise UserError(f"no file {args.perplexity}")
    made: list[Record] = []
    for model in args.model:
        file = resolve(program, model)
        measure = load if args.load else perplexity if args.perplexity else bench
        new, clocks = measure(program, file, args)
        executor = new[0]["executor"]
        made += records.annotate(new, {}, command_line(model, executor, args), build.toolchain(executor), clocks)
    print(as_table(made))
    if args.runs:
        add(made, args.runs)
    return 0


def resolve(program: Path, model: str) -> Path:
    """The file that a MODEL argument names, made if need be."""
    name, _, type_ = model.partition(":")
    if not type_:
        if not Path(name).is_file():
            raise UserError(f"no file {name}; a model of random weights is named SIZE:TYPE, such as 0.5b:Q4_0")
        return Path(name)
    MODELS.mkdir(parents=True, exist_ok=True)
    source = Path(name) if name.endswith(".gguf") else None
    if source and not source.is_file():
        raise UserError(f"no file {name}")
    out = MODELS / f"{source.stem if source else name.lower()}-{type_.lower()}.gguf"
    # A synthetic model is the same whenever it is made; a quantized one is made anew if its source is younger.
    if not out.exists() or (source and out.stat().st_mtime < source.stat().st_mtime):
        verb = ["quantize", str(source), str(out), type_] if source else ["synthetic", name, type_, str(out)]
        say(f"making {shown(out)}")
        done = subprocess.run([str(program), *verb], cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise StepFailed(f"qwen {verb[0]} ended with status {done.returncode} (the line above says why)")
    return out


def output(program: Path, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """What the program prints, with `variables` added to its environment."""
    command = [str(program), *arguments]
    env = {**os.environ, **(variables or {})}
    done = subprocess.run(command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, env=env)
    if done.returncode:
        raise StepFailed(f"qwen {arguments[0]} ended with status {done.returncode} (the line above says why)")
    return done.stdout


def call(program: Path, arguments: Sequence[str], gpu: bool) -> tuple[str, Record]:
    """What the program prints, and the GPU's clocks meanwhile."""
    with run.watched_clocks() if gpu else contextlib.nullcontext({}) as clocks:
        text = output(program, arguments)
    return text, dict(clocks)


def bench(program: Path, file: Path, args: argparse.Namespace) -> tuple[list[Record], Record]:
    options = ["--on", args.on or "auto", "-r", str(args.repetitions)]
    options += ["-p", args.n_prompt, "-n", args.n_gen, "-d", args.n_depth]
    text, clocks = call(program, ["bench", str(file), *options, "-o", "record"], on_gpu(args))
    return records.parse(text, "qwen bench"), clocks


def perplexity(program: Path, file: Path, args: argparse.Namespace) -> tuple[list[Record], Record]:
    options = ["--on", args.on or "auto", "--json"]
    text, clocks = call(program, ["perplexity", str(file), str(args.perplexity), *options], on_gpu(args))
    (found,) = json_lines(text, "qwen perplexity")
    census = explained(program, file)
    record: Record = {
        "schema": 1,
        "rung": "engine",
        "executor": found["executor"],
        "device": found["device"],
        "model": {
            "name": found["model"],
            "size": census["size_label"],
            "file_type": found["file_type"],
            "bytes_per_token": census["bytes_per_token"],
        },
        "test": "perplexity",
        "params": {"text": shown(args.perplexity), "window": found["window"], "tokens": found["counted_tokens"]},
        "perplexity": {"value": found["perplexity"], "standard_error": found["standard_error"]},
    }
    return [record], clocks


def explained(program: Path, file: Path) -> Record:
    found: Record = json.loads(output(program, ["explain", str(file), "--json"]))
    return found


def load(program: Path, file: Path, args: argparse.Namespace) -> tuple[list[Record], Record]:
    """The program's own time from the start of loading to its end: with the file in the page cache, and with nothing of
    it there.  Beside the second, the time that reading the file alone takes."""
    census = explained(program, file)

    def once() -> Record:
        found: Record = json.loads(output(program, ["run", str(file), "a", "-n", "1", "--json", "--on", "gpu"]))
        return found

    once()  # which leaves the file in the cache
    cached = [once() for _ in range(args.repetitions)]
    cold, alone = [], []
    for _ in range(args.repetitions):
        forget(file)
        cold.append(once())
        forget(file)
        begin = time.monotonic()
        with file.open("rb", buffering=0) as whole:
            while whole.read(1 << 26):
                pass
        alone.append(time.monotonic() - begin)
    spec = devices.spec_for(cached[0]["device"])
    made = []
    for test, runs, read in (("load cached", cached, None), ("load cold", cold, statistics.median(alone))):
        seconds = statistics.median(found["timings"]["load_seconds"] for found in runs)
        loaded: Record = {"bytes": runs[0]["timings"]["load_bytes"], "seconds": seconds}
        made.append(
            {
                "schema": 1,
                "rung": "engine",
                "executor": "gpu",
                "device": spec["slug"] if spec else devices.slugify(cached[0]["device"]),
                "model": {
                    "size": census["size_label"],
                    "file_type": census["file_type"],
                    "bytes_per_token": census["bytes_per_token"],
                },
                "test": test,
                "load": {**loaded, "read_seconds": read} if read else loaded,
            }
        )
    return made, {}


def forget(file: Path) -> None:
    """Takes a file out of the page cache.  StepFailed if it stays there, as in a file system that is in memory."""
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(opened.fileno()).st_size
        with mmap.mmap(opened.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            first = ctypes.c_char.from_buffer(view)
            ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
            del first
    there = sum(page & 1 for page in bytes(pages)) / len(pages)
    if there > 0.01:
        raise StepFailed(f"{shown(file)} does not leave the page cache: {100 * there:.0f} % of it is still there")


def on_gpu(args: argparse.Namespace) -> bool:
    return args.on == "gpu" or (args.on is None and any(c.gpu_device for c in build.chapters(build.BUILD)[:1]))


def command_line(model: str, executor: str, args: argparse.Namespace) -> str:
    """The command as a reader would type it to get the same record."""
    name, _, type_ = model.partition(":")
    if name.endswith(".gguf"):
        name = shown(Path(name))
    words = ["scripts/ladder", "engine", f"{name}:{type_}" if type_ else name, "--on", executor]
    if args.perplexity:
        return shlex.join([*words, "--perplexity", shown(args.perplexity)])
    if args.load:
        return shlex.join([*words, "--load", "-r", str(args.repetitions)])
    words += ["-p", args.n_prompt, "-n", args.n_gen, "-d", args.n_depth, "-r", str(args.repetitions)]
    return shlex.join(words)


def add(made: Sequence[Record], runs: Path) -> None:
    for record in made:
        wrong = records.problems(record, committed=True)
        if wrong:
            raise StepFailed(f"the engine's record cannot be kept: it {wrong[0]}")
    for device in sorted({record["device"] for record in made}):
        path = runs / device / f"{CHAPTER}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = [record for record in made if record["device"] == device]
        run.emit(mine, str(path))
        say(f"{len(mine)} records added to {shown(path)}")


def as_table(made: Sequence[Record]) -> str:
    rows = []
    for record in made:
        model, rate, roof = record["model"], record.get("tokens_per_s"), record.get("percent_of_roof")
        if rate:
            result = f"{rate['mean']:,.1f} ± {rate['stddev']:.1f} tok/s"
        elif loaded := record.get("load"):
            result = f"{loaded['bytes'] / 1e9:.2f} GB in {loaded['seconds']:.2f} s"
            if "read_seconds" in loaded:
                result += f", reading alone {loaded['read_seconds']:.2f} s"
        else:
            result = f"{record['perplexity']['value']:.3f} ± {record['perplexity']['standard_error']:.3f}"
        name = f"{model.get('name', '')} {model['size']} {model['file_type']}".strip()
        row = [name, record["test"], f"{model['bytes_per_token'] / 1e6:,.1f}", result]
        rows.append([*row, f"{roof:.1f}" if roof else ""])
    head = ["model", "test", "MB per token", "result", "% of roof"]
    columns = len(head) if any(row[-1] for row in rows) else len(head) - 1
    return markdown_table(head[:columns], [row[:columns] for row in rows], range(2, columns))
