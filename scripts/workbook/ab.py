"""A/B runs of the final program: the same model with and without one switch, in turns; and against llama-bench."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import build, engine, run
from .common import ROOT, StepFailed, UserError, markdown_table, one_of, say

Record = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One switch and the model on which it shows."""

    variables: Mapping[str, str]
    model: str
    text: str


EXPERIMENTS = {
    "q40_mmvq": Experiment(
        {"LADDER_NO_Q40_MMVQ": "1"}, "0.5b:Q4_0", "Q4_0 decodes with f32 activations: tg moves, the bytes do not"
    ),
    "q80_mmvq": Experiment({"LADDER_NO_Q80_MMVQ": "1"}, "0.5b:Q8_0", "Q8_0 decodes with f32 activations"),
    "kq_mmvq": Experiment({"LADDER_NO_KQ_MMVQ": "1"}, "7b:Q4_K_M", "K-quants decode with f32 activations"),
    "mmvq_v1": Experiment(
        {"LADDER_MMVQ_V1": "1"}, "7b:Q4_K_M", "decoding reads the file's blocks instead of tiles: tg alone moves"
    ),
    "mmq_on": Experiment({"LADDER_MMQ": "1"}, "7b:Q4_K_M", "prompts in int8 whatever the gates say: pp alone moves"),
    "mmq_off": Experiment(
        {"LADDER_MMQ": "0"}, "7b:Q4_K_M", "prompts over f16 copies of the weights: 3.6 times the bytes, pp alone moves"
    ),
    "prefill_gemm": Experiment(
        {"LADDER_NO_PREFILL_GEMM": "1"}, "0.5b:Q4_0", "prompts eight rows at a time through the kernels of decoding"
    ),
    "small_m_gemm": Experiment(
        {"LADDER_SMALL_M_GEMM": "1"}, "0.5b:Q4_0", "the kernels of prompts from two rows on (see it with -p 4,8)"
    ),
    "cuda_graph": Experiment(
        {"LADDER_NO_CUDA_GRAPH": "1"}, "0.5b:Q4_0", "every kernel of a token launched by the host"
    ),
    "seed_gates": Experiment({"LADDER_GATES": "seed"}, "0.5b:Q4_0", "the seed's gates instead of the device's"),
}


def add_ab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="one of: " + ", ".join(EXPERIMENTS) + "; none lists them"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="as scripts/ladder engine takes it (default: the experiment's)"
    )
    parser.add_argument("-p", "--n-prompt", default="512", metavar="N,..", help="tokens of prompts (512)")
    parser.add_argument("-n", "--n-gen", default="64", metavar="N,..", help="tokens to generate (64)")
    parser.add_argument("-r", "--rounds", type=run.positive, default=3, metavar="N", help="runs of each, in turns (3)")
    parser.add_argument("--explain", action="store_true", help="only say which kernels change; needs no GPU")
    run.add_build_options(parser)
    parser.set_defaults(do=command_ab)


def add_compare_llama(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="FILE.gguf, or SIZE:TYPE as scripts/ladder engine takes it")
    parser.add_argument("-p", "--n-prompt", default="512", metavar="N,..", help="tokens of prompts (512)")
    parser.add_argument("-n", "--n-gen", default="128", metavar="N,..", help="tokens to generate (128)")
    parser.add_argument("-r", "--rounds", type=run.positive, default=3, metavar="N", help="runs of each, in turns (3)")
    parser.add_argument("--on", choices=("gpu", "cpu"), help="where to run (default: the GPU if there is one)")
    run.add_build_options(parser)
    parser.set_defaults(do=command_compare_llama)


def changed_kernels(program: Path, file: Path, variables: Mapping[str, str]) -> list[list[str]]:
    """Matrices whose kernel the variables change, one line for those that change alike."""

    def explained(extra: Mapping[str, str]) -> list[Record]:
        done = subprocess.run(
            [str(program), "explain", str(file), "--json"],
            cwd=ROOT,
            check=False,
            text=True,
            capture_output=True,
            env={**os.environ, **extra},
        )
        if done.returncode:
            raise StepFailed(f"qwen explain ended with status {done.returncode}: {done.stderr.strip()}")
        found: list[Record] = json.loads(done.stdout)["dispatch"]
        return found

    lines: dict[tuple[str, ...], int] = {}
    for a, b in zip(explained({}), explained(variables), strict=True):
        for before, after in zip(a["at"], b["at"], strict=True):
            if (before["kernel"], before["gate"]) != (after["kernel"], after["gate"]):
                role = a["tensor"].removesuffix(".weight").split(".")[-1]
                line = (role, a["type"], str(before["nt"]), f"{before['kernel']} ({before['gate']})",
                        f"{after['kernel']} ({after['gate']})")  # fmt: skip
                lines[line] = lines.get(line, 0) + 1
    return [[f"{role} x{n}" if n > 1 else role, *rest] for (role, *rest), n in lines.items()]


def once(
    program: Path, file: Path, args: argparse.Namespace, on: str, variables: Mapping[str, str]
) -> dict[str, float]:
    """One run of `qwen bench`: test -> tokens/s."""
    done = subprocess.run(
        [str(program), "bench", str(file), "--on", on, "-r", "1", "-p", args.n_prompt, "-n", args.n_gen, "-o", "jsonl"],
        cwd=ROOT,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
    )
    if done.returncode:
        raise StepFailed(f"qwen bench ended with status {done.returncode} (the line above says why)")
    rates = {}
    for line in done.stdout.splitlines():
        found = json.loads(line)
        name = f"pp{found['n_prompt']}" if found["n_prompt"] else f"tg{found['n_gen']}"
        rates[name] = float(found["avg_ts"])
    return rates


def ratios(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], names: tuple[str, str]) -> str:
    """Medians of both and their ratio, a test a line."""
    rows = []
    for test in a:
        if test in b:
            first, second = statistics.median(a[test]), statistics.median(b[test])
            rows.append([test, f"{first:.1f}", f"{second:.1f}", f"{second / first:.3f}"])
    return markdown_table(["test", f"{names[0]}, tokens/s", f"{names[1]}, tokens/s", "ratio"], rows, right=(1, 2, 3))


def switch_of(experiment: Experiment) -> str:
    return " ".join(f"{name}={value}" for name, value in experiment.variables.items())


def command_ab(args: argparse.Namespace) -> int:
    if args.name is None:
        rows = [[name, switch_of(e), e.model, e.text] for name, e in EXPERIMENTS.items()]
        print(markdown_table(["name", "switch", "model", "what it shows"], rows))
        return 0
    if args.name not in EXPERIMENTS:
        raise one_of("experiment", args.name, EXPERIMENTS)
    experiment = EXPERIMENTS[args.name]
    folder = run.prepare(args)
    program = build.built_qwen(folder, None)
    file = engine.resolve(program, args.model or experiment.model)
    print(f"{switch_of(experiment)}: {experiment.text}\n")
    changed = changed_kernels(program, file, experiment.variables)
    print(
        markdown_table(["matrix", "type", "nt", "without", "with"], changed, right=(2,))
        if changed
        else "No kernel of a multiplication changes."
    )
    if args.explain:
        return 0
    program = build.built_qwen(folder, "gpu")
    a: dict[str, list[float]] = {}
    b: dict[str, list[float]] = {}
    for turn in range(args.rounds):
        say(f"{args.name}: round {turn + 1} of {args.rounds}")
        for rates, variables in ((a, {}), (b, experiment.variables)):
            for test, rate in once(program, file, args, "gpu", variables).items():
                rates.setdefault(test, []).append(rate)
    print("\n" + ratios(a, b, ("without", "with")))
    return 0


def command_compare_llama(args: argparse.Namespace) -> int:
    peer = shutil.which("llama-bench")
    if peer is None:
        raise UserError(
            "there is no llama-bench on PATH; build llama.cpp (https://github.com/ggml-org/llama.cpp) and "
            "add its folder"
        )
    folder = run.prepare(args)
    program = build.built_qwen(folder, args.on)
    file = engine.resolve(program, args.model)
    layers = "0" if args.on == "cpu" else "99"
    mine: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for turn in range(args.rounds):
        say(f"round {turn + 1} of {args.rounds}")
        for test, rate in once(program, file, args, args.on or "auto", {}).items():
            mine.setdefault(test, []).append(rate)
        call = [peer, "-m", str(file), "-p", args.n_prompt, "-n", args.n_gen, "-r", "1", "-ngl", layers, "-o", "jsonl"]
        done = subprocess.run(call, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if done.returncode:
            raise StepFailed(f"{shlex.join(call)} ended with status {done.returncode}")
        for line in done.stdout.splitlines():
            if not line.strip():
                continue
            found = json.loads(line)
            name = f"pp{found['n_prompt']}" if found["n_prompt"] else f"tg{found['n_gen']}"
            theirs.setdefault(name, []).append(float(found["avg_ts"]))
    print(ratios(theirs, mine, ("llama-bench", "qwen bench")))
    return 0
