"""The command line: subcommands, their options, and how errors end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from . import records
from .build import BUILD
from .common import USAGE_ERROR, StepFailed, UserError

EPILOG = """\
The first command that needs something makes it and says so: a virtual environment in .venv (scripts/requirements.txt),
a build in build/. After that nothing needs the network. Debian packages are installed only as root, or after a yes at a
terminal; LADDER_NO_APT=1 forbids it. CXX chooses the compiler. Exit status: 0 done, 1 a check or test failed, 2 the
command line asks for something that is not there."""


class Parser(argparse.ArgumentParser):
    """Errors in one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"ladder: {message} ({self.prog} --help lists what is allowed)\n")


def make_parser() -> Parser:
    from . import ab, emulate, engine, run, tune

    top = Parser(
        prog="scripts/ladder",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The Matmul Ladder: run, check, measure and plot every rung, with or without a GPU.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name: str, text: str, more: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}")

    demo = add(
        "demo",
        "set up, build, climb the rungs on the best executor here, and plot",
        "Without a GPU: the CPU twins give the times, the emulator checks the CUDA kernels. "
        "Plots and records go to build/demo/.",
    )
    demo.add_argument("--quick", action="store_true", help="one small layer and one token row only")
    demo.set_defaults(do=_demo)

    test = add("test", "run every test that this machine can run", "Says what was skipped and why.")
    test.set_defaults(do=_test)

    doctor = add("doctor", "say which toolchains, GPU and driver are here, what will run and how to get the rest")
    doctor.set_defaults(do=_doctor)

    listing = add("list", "show rungs, chapters, executors and shapes", "Builds nothing.")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    listing.add_argument(
        "--build-dir", type=Path, default=BUILD, metavar="DIR", help="where the binaries are (default: build)"
    )
    listing.set_defaults(do=_list)

    once = add(
        "run",
        "run rungs or a chapter and print what was measured",
        "Example: scripts/ladder run gemv_vec --layer 7b.ffn_down --nt 1,8",
    )
    once.add_argument("target", nargs="+", metavar="ID|CHAPTER", help="rung ids or chapters, e.g. gemv_vec or 02")
    run.add_run_options(once)
    emulate.add_model_options(once)
    emulate.add_report_options(once)
    once.add_argument("--json", metavar="FILE", help="append the records to FILE (- prints them)")
    once.set_defaults(do=run.command_run)

    record = add(
        "record", "run, and add the records to data/runs", "Without a target: every chapter's default experiment."
    )
    record.add_argument("target", nargs="*", metavar="ID|CHAPTER", help="rung ids or chapters (default: every chapter)")
    run.add_run_options(record)
    emulate.add_model_options(record)
    record.add_argument(
        "--runs", type=Path, default=records.RUNS, metavar="DIR", help="where to add (default: data/runs)"
    )
    record.set_defaults(do=run.command_record)

    count = add(
        "counters",
        "read the GPU's own counters with Nsight Compute, and add them to data/runs",
        "One profiled launch for each rung and shape, after its check; no times. Names are the emulator's where the "
        "meaning is the same. Example: scripts/ladder counters gemv_vec --layer 7b.ffn_down --nt 1,8",
    )
    count.add_argument("target", nargs="+", metavar="ID|CHAPTER", help="rung ids or chapters, e.g. gemv_vec or 02")
    run.add_shape_options(count)
    run.add_build_options(count)
    count.add_argument(
        "--runs", type=Path, default=records.RUNS, metavar="DIR", help="where to add (default: data/runs)"
    )
    count.set_defaults(do=_counters)

    own = add(
        "emulate",
        "compile a file of your own for the emulator, and run it",
        "The file is an ordinary CUDA source with a main, see harness/emulator/example/first_kernel.cu. "
        "Example: scripts/ladder emulate my_kernel.cu -- 64",
    )
    emulate.add_emulate(own)

    whole = add(
        "engine",
        "measure a whole model with the final program",
        "Speed as llama-bench measures it, or perplexity; --runs keeps the records. "
        "Example: scripts/ladder engine 0.5b:Q4_0 --on cpu -p 512 -n 128",
    )
    engine.add_engine(whole)

    both = add(
        "ab",
        "measure a model with and without one switch, in turns",
        "Says which kernels the switch changes, then tokens a second of both. Example: scripts/ladder ab mmq_off",
    )
    ab.add_ab(both)

    llama = add(
        "compare-llama",
        "measure the final program and llama-bench on the same file, in turns",
        "llama-bench must be on PATH; it is told to use the same device.",
    )
    ab.add_compare_llama(llama)

    tuned = add(
        "tune",
        "find where kernels overtake each other on a device, and write its table of gates",
        "From the records of data/runs, or measured now with --measure; the program loads the table of its device.",
    )
    tune.add_tune(tuned)

    compare = add("compare", "time two rungs in turn (A/B/A/B) and say which is faster")
    compare.add_argument("a", metavar="A", help="rung id")
    compare.add_argument("b", metavar="B", help="rung id")
    run.add_run_options(compare, with_check=False)
    compare.add_argument("--json", metavar="FILE", help="append the records to FILE (- prints them)")
    compare.set_defaults(do=run.command_compare)

    plot = add(
        "plot",
        "draw records as SVG and PNG",
        "roofline: every rung under the measured and published roofs. intensity: arithmetic intensity and time "
        "against nt. ladder: percent of the roof, rung by rung. dispatch: the kernel that a device's gates choose for "
        "each type and nt, and the times behind it.",
    )
    plot.add_argument(
        "kind", choices=("roofline", "intensity", "ladder", "dispatch"), metavar="roofline|intensity|ladder|dispatch"
    )
    plot.add_argument("--type", metavar="T", help="dispatch: the type whose times are drawn (default: q4_k)")
    plot.add_argument(
        "--device", metavar="D", help="folder name under data/runs (default: this machine's, or the only one)"
    )
    plot.add_argument("--layer", metavar="NAME", help="the matmul to draw (default: the largest that has records)")
    plot.add_argument("--mode", choices=("cold", "hot"), default="cold", help="which measurements (default: cold)")
    plot.add_argument(
        "--nt", type=run.positive_list, metavar="N[,N..]", help="token rows to draw (default: all; ladder: 1)"
    )
    plot.add_argument(
        "--records", type=Path, action="append", metavar="FILE", help="draw this file instead of data/runs"
    )
    plot.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a .svg or .png (default: both, in build/plots)"
    )
    plot.set_defaults(do=_plot)

    weave = add("weave", "rewrite the generated regions of all text from sources and records")
    weave.add_argument(
        "--check", action="store_true", help="write nothing; fail if anything would change or is missing"
    )
    weave.add_argument("file", nargs="*", type=Path, metavar="FILE", help="Markdown files (default: all)")
    weave.set_defaults(do=_weave)
    return top


# Commands that need more than the standard library import their modules only when they run.


def _demo(args: argparse.Namespace) -> int:
    from . import demo

    return demo.command_demo(args)


def _test(args: argparse.Namespace) -> int:
    from . import testing

    return testing.command_test(args)


def _doctor(args: argparse.Namespace) -> int:
    from . import listing

    return listing.command_doctor(args)


def _list(args: argparse.Namespace) -> int:
    from . import listing

    return listing.command_list(args)


def _counters(args: argparse.Namespace) -> int:
    from . import counters

    return counters.command_counters(args)


def _plot(args: argparse.Namespace) -> int:
    from . import setup

    setup.rerun_in_venv(sys.argv[1:])
    if args.kind == "dispatch":
        from . import dispatch_plot

        return dispatch_plot.command_plot_dispatch(args)
    from . import plots

    return plots.command_plot(args)


def _weave(args: argparse.Namespace) -> int:
    from . import setup

    setup.rerun_in_venv(sys.argv[1:])
    from . import weave

    return weave.command_weave(args)


def parse(words: list[str]) -> argparse.Namespace:
    """The command line; what follows -- belongs to the program that `emulate` runs."""
    end = words.index("--") if words[:1] == ["emulate"] and "--" in words else len(words)
    args = make_parser().parse_args(words[:end])
    args.arguments = words[end + 1 :]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse(list(sys.argv[1:] if argv is None else argv))
        status: int = args.do(args)
        sys.stdout.flush()
    except UserError as error:
        print(f"ladder: {error}", file=sys.stderr)
        return USAGE_ERROR
    except StepFailed as error:
        print(f"ladder: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ladder: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk, a folder without permission: nothing that a traceback would explain
        print(f"ladder: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    return status
