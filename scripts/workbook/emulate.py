"""What belongs to the emulator alone: readers' own files, registers, and bytes declared, counted and measured."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import build, records, setup
from .common import StepFailed, UserError, capture, say, shown
from .records import Record

MODEL_VARIABLE = "LADDER_EMULATOR_DEVICE"
REGISTERS_VARIABLE = "LADDER_EMULATOR_REGISTERS"
PICTURES_VARIABLE = "LADDER_EMULATOR_PICTURES"
THREADS_VARIABLE = "LADDER_EMULATOR_THREADS"
_SECTOR_BYTES = 32
SOURCES = (".cu", ".cpp", ".cc", ".cxx")


# --- options of run, record and emulate ---------------------------------------------------------------------------


def register_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 255:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number from 1 to 255')
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which GPU the emulator stands for."""
    parser.add_argument("--device-model", metavar="D", help="emulator: limits of this GPU (a name in data/devices)")
    parser.add_argument(
        "--registers",
        type=register_count,
        metavar="N",
        help="emulator: registers of a thread, for the occupancy (default: what cuobjdump says of the CUDA binary)",
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", action="store_true", help="emulator: counts of every access (the default)")
    parser.add_argument("--brief", action="store_true", help="emulator: one line for each rung instead")
    parser.add_argument("--annotate", action="store_true", help="emulator: the source with counts in the margin")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="emulator: one request of each line, as SVG")


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The same options as a reader would type them: they belong to the record's command."""
    given = ["--device-model", args.device_model] if args.device_model else []
    return [*given, "--registers", str(args.registers)] if args.registers else given


def report_arguments(args: argparse.Namespace, on: str | None) -> list[str]:
    """What the chapter binary is asked to print; by default the emulator reports every access."""
    asked = [f"--{name}" for name in ("report", "annotate", "brief", "registers") if getattr(args, name, None)]
    asked += ["--pictures"] if getattr(args, "pictures", None) else []
    asked += ["--device-model"] if getattr(args, "device_model", None) else []
    if on != "emulator":
        if asked:
            raise UserError(f"{', '.join(asked)}: only with --on emulator")
        return []
    if not hasattr(args, "report"):
        return []
    if args.report and args.brief:
        raise UserError("give either --report or --brief, not both")
    if args.check_only:
        if {"--report", "--annotate", "--pictures"} & set(asked):
            raise UserError("--check-only counts nothing, so there is nothing to report")
        return []
    given = [] if args.brief else ["--report"]
    given += ["--annotate"] if args.annotate else []
    if args.pictures:
        given += ["--pictures", str(args.pictures.resolve())]
    return given


def environment(args: argparse.Namespace, binaries: Sequence[Path] = ()) -> dict[str, str]:
    """Variables by which the emulator learns of the model and of registers.  An unknown model is an error here."""
    made: dict[str, str] = {}
    if args.device_model:
        made[MODEL_VARIABLE] = args.device_model
    if args.registers:
        made[REGISTERS_VARIABLE] = str(args.registers)
    elif REGISTERS_VARIABLE not in os.environ:
        known = registers_of(binaries)
        if known:
            made[REGISTERS_VARIABLE] = ";".join(f"{name}={count}" for name, count in known.items())
    return made


# --- registers, from the CUDA build ---------------------------------------------------------------------------------


def parse_resource_usage(text: str) -> dict[str, int]:
    """Registers by mangled kernel name, from `cuobjdump --dump-resource-usage`; the most, where there are several
    architectures."""
    found: dict[str, int] = {}
    name = None
    for line in text.splitlines():
        function = re.match(r"\s*Function\s+(\S+?):?\s*$", line)
        if function:
            name = function[1]
            continue
        count = re.search(r"\bREG:(\d+)", line)
        if count and name:
            found[name] = max(found.get(name, 0), int(count[1]))
            name = None
    return found


def plain_name(demangled: str) -> str:
    """A kernel's name as the emulator prints it: without return type and parameters.

    "void ladder::gemv_vec<1, 4>(float const*, int)" -> "ladder::gemv_vec<1, 4>"
    """
    text = re.sub(r"\(anonymous namespace\)", "{anonymous}", demangled)
    depth, end = 0, len(text)
    for at, letter in enumerate(text):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            end = at
            break
    text = text[:end]
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += {">": 1, "<": -1}.get(text[at], 0)
        if text[at] == " " and depth == 0:
            text = text[at + 1 :]
            break
    return text.removeprefix("{anonymous}::").replace("{anonymous}", "(anonymous namespace)")


def registers_of(binaries: Sequence[Path]) -> dict[str, int]:
    """Registers of every kernel of CUDA binaries, by readable name; empty where no tool can say it."""
    cuda = setup.nvcc()
    tool = Path(cuda.path).with_name("cuobjdump") if cuda else None
    if tool is None or not tool.exists():
        return {}
    found: dict[str, int] = {}
    for binary in binaries:
        if not binary.exists():
            continue
        status, text, _ = capture([tool, "--dump-resource-usage", binary], timeout=60)
        usage = parse_resource_usage(text) if status == 0 else {}
        if not usage:
            continue
        status, names, _ = capture(["c++filt", *usage], timeout=60)
        if status == 0:
            pairs = zip(names.splitlines(), usage.values(), strict=False)
            found.update({plain_name(name): count for name, count in pairs})
    return found


# --- bytes ----------------------------------------------------------------------------------------------------------


def _megabytes(count: float | None, declared: float | None = None) -> str:
    if count is None:
        return "-"
    text = f"{count / 1e6:,.3f}" if count < 1e8 else f"{count / 1e6:,.1f}"
    return f"{text} ({count / declared:.2f}x)" if declared else text


def bytes_report(made: Sequence[Record], committed: Sequence[Record]) -> str:
    """Declared, counted and measured bytes of each record just made, in 100 columns.

    `committed` are records with counters of GPUs; the one of the same rung and shape is shown, newest last.
    """
    form = "{:<50} {:>15} {:>15} {:>15}"
    lines = []
    for record in made:
        counters, declared = record.get("counters"), record.get("bytes", {}).get("total")
        if not counters or declared is None or "shape" not in record:  # no matmul: its binary says what it counted
            continue
        gpu = next((r for r in reversed(committed) if all(r.get(k) == record.get(k) for k in ("rung", "shape"))), None)
        shape = record["shape"]
        lines.append(f"{record['rung']}, {record.get('layer') or '{od}x{id}'.format(**shape)}, nt {shape['nt']}")
        lines.append(form.format("  declared: every operand once", _megabytes(declared), "", ""))
        counted = (counters["unique_bytes"], counters["past_l1_bytes"], counters["sectors"] * _SECTOR_BYTES)
        lines.append(form.format("  counted by the emulator", *(_megabytes(n, declared) for n in counted)))
        if gpu is not None and gpu.get("source_sha256") != record.get("source_sha256"):
            lines.append(f"  measured: the record of {gpu['device']} is of another version of this kernel")
            continue
        if gpu is None:
            lines.append("  measured: no record of a GPU's counters at this shape (scripts/ladder counters)")
            continue
        measured = gpu["counters"]
        sectors = measured["sectors"] * _SECTOR_BYTES if "sectors" in measured else None
        cells = (measured.get("dram_read_bytes"), measured.get("past_l1_bytes"), sectors)
        where = f"  measured on {gpu['device']} (first: DRAM reads)"
        lines.append(form.format(where[:50], *(_megabytes(n, declared) for n in cells)))
    if not lines:
        return ""
    head = form.format("bytes of global memory, MB (times declared)", "distinct", "past L1", "all requests")
    return "\n".join(line.rstrip() for line in [head, *lines])


def print_bytes(made: Sequence[Record]) -> None:
    wanted = [record for record in made if record["executor"] == "emulator" and "counters" in record]
    if not wanted:
        return
    committed = [
        line.record
        for line in records.load_committed()
        if line.record["executor"] == "gpu" and "counters" in line.record
    ]
    committed.sort(key=lambda record: record["date"])
    text = bytes_report(wanted, committed)
    if text:
        print(text, flush=True)


# --- a reader's own file --------------------------------------------------------------------------------------------


def recipe(folder: Path) -> tuple[list[str], list[str]]:
    """The commands that compile and link a chapter for the emulator, as Ninja knows them: words that name the source,
    the object and the program replaced by {source}, {object} and {program}."""
    ninja = setup.venv_tool("ninja")
    for chapter in build.chapters(folder):
        target = str(chapter.host.relative_to(folder))
        status, text, _ = capture([ninja, "-C", folder, "-t", "commands", target], timeout=60)
        lines = [shlex.split(line) for line in text.splitlines() if line.strip()]
        if status or not lines:
            continue
        link = lines[-1]
        compiles = [words for words in lines if "-c" in words and f"{chapter.stem}_host.cpp" in words[-1]]
        if len(compiles) != 1 or "-o" not in link or "-o" not in compiles[0]:
            continue
        (compile_,) = compiles
        object_ = compile_[compile_.index("-o") + 1]
        return _compile_recipe(compile_, object_), [
            _placed(word, {target: "{program}", object_: "{object}"}) for word in link
        ]
    raise UserError(f"{shown(folder)} has no build of a chapter for the emulator; scripts/ladder test makes one")


def _placed(word: str, places: Mapping[str, str]) -> str:
    return places.get(word, word)


def _compile_recipe(words: Sequence[str], object_: str) -> list[str]:
    made: list[str] = []
    skip = False
    for word in words[:-1]:
        if skip:
            skip = False
        elif word in ("-MF", "-MQ", "-MT"):
            skip = True  # Ninja's own dependency files
        elif word not in ("-MD", "-MMD"):
            made.append(_placed(word, {object_: "{object}"}))
    return [*made[:-1], "-x", "c++", made[-1], "{source}"] if made[-1] == "-c" else [*made, "-x", "c++", "{source}"]


def compile_file(source: Path, program: Path, folder: Path) -> None:
    """Compile and link a reader's file as the chapters are.  The compiler's messages go to stderr as they are."""
    compile_, link = recipe(folder)
    with tempfile.TemporaryDirectory(prefix="ladder-") as scratch:
        places = {"{source}": str(source), "{object}": str(Path(scratch) / "reader.o"), "{program}": str(program)}
        for words in (compile_, link):
            done = subprocess.run([_placed(word, places) for word in words], cwd=folder, check=False)
            if done.returncode:
                raise StepFailed(f"{source.name} does not compile for the emulator (the lines above say why)")


def command_emulate(args: argparse.Namespace) -> int:
    from . import run

    source: Path = args.file
    if not source.is_file():
        raise UserError(f"no file {source}")
    if source.suffix not in SOURCES:
        raise UserError(f"{source} is not a source file for a compiler ({', '.join(SOURCES)})")
    variables = environment(args)
    # Blocks in order, so that a race is told the same way every time: which of two blocks came first is in the report.
    variables[THREADS_VARIABLE] = os.environ.get(THREADS_VARIABLE, "1")
    if args.pictures:
        variables[PICTURES_VARIABLE] = str(args.pictures.resolve())
    folder = run.prepare(args)
    with tempfile.TemporaryDirectory(prefix="ladder-") as scratch:
        program = args.output.resolve() if args.output else Path(scratch) / source.stem
        if args.output and not program.parent.is_dir():
            raise UserError(f"--output: no folder {args.output.parent}")
        compile_file(source.resolve(), program, folder)
        if args.output:
            say(f"the program is {args.output}")
        try:
            status = subprocess.run(
                [str(program), *args.arguments], check=False, env={**os.environ, **variables}
            ).returncode
        except OSError as error:
            raise StepFailed(f"{program.name} cannot be run: {error.strerror or error}") from None
    if status < 0:
        raise StepFailed(f"{source.name} was ended by signal {-status}")
    return status


def add_emulate(parser: argparse.ArgumentParser) -> None:
    from . import run

    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a .cu file with kernels and a main; its own arguments follow --"
    )
    add_model_options(parser)
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="one request of each line of counted launches, as SVG"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PROGRAM", help="keep the program, e.g. for gdb")
    run.add_build_options(parser)
    parser.set_defaults(do=command_emulate)
