"""The program `qwen` as a user meets it, on the bundled model.

LADDER_QWEN and LADDER_QWEN_MODEL name another binary and another F16 model file.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
import pty
import re
import resource
import select
import signal
import struct
import subprocess
import tempfile
import termios
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.support import ROOT
from workbook import records

QWEN = Path(os.environ.get("LADDER_QWEN", ROOT / "build" / "chapters" / "09-qwen" / "qwen"))
MODEL = Path(os.environ.get("LADDER_QWEN_MODEL", ROOT / "data" / "models" / "tales-f16.gguf"))
COMMANDS = ("run", "chat", "perplexity", "bench", "explain", "tokenize", "logits", "quantize", "synthetic")
TALE = "Once upon a time there was a little girl who lived with her mother near a great forest. "


def missing() -> str | None:
    if not os.access(QWEN, os.X_OK):
        return f"{QWEN.name} is not built"
    return None if MODEL.exists() else f"{MODEL} is not there"


@functools.cache
def gpu() -> bool:
    """Whether `--on gpu` works here."""
    if missing() or not (QWEN.parent / "qwen_cuda").exists():
        return False
    done = subprocess.run(
        [str(QWEN), "run", str(MODEL), "Once", "-n", "1", "--on", "gpu"], capture_output=True, check=False, timeout=300
    )
    return done.returncode == 0


@unittest.skipIf(missing(), missing() or "")
class QwenCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="qwen-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def qwen(self, *args: object, stdin: str | bytes = b"", status: int = 0) -> subprocess.CompletedProcess:
        """Run it; output as bytes, which need not be UTF-8 if it is wrong."""
        done = subprocess.run(
            [str(QWEN), *map(str, args)],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            check=False,
            timeout=300,
        )
        self.assertEqual(done.returncode, status, f"{args}: {done.stderr.decode(errors='replace')}")
        return done

    def text(self, *args: object, stdin: str | bytes = b"") -> str:
        return self.qwen(*args, stdin=stdin).stdout.decode()

    def json(self, *args: object, stdin: str | bytes = b"") -> dict:
        return json.loads(self.qwen(*args, "--json", stdin=stdin).stdout)

    def generated(self, *args: object, stdin: str | bytes = b"") -> dict:
        """`run` on the CPU, greedy."""
        return self.json("run", MODEL, *args, "--on", "cpu", "--temp", "0", stdin=stdin)

    def refused(self, *args: object, words: tuple[str, ...], status: int = 2, stdin: str | bytes = b"") -> None:
        """One line on stderr that has these words, nothing on stdout."""
        done = self.qwen(*args, stdin=stdin, status=status)
        said = done.stderr.decode()
        self.assertEqual(len(said.strip().splitlines()), 1, said)
        self.assertTrue(said.startswith("qwen: "), said)
        self.assertEqual(done.stdout, b"")
        for word in words:
            self.assertIn(word, said)

    def changed_model(self, name: str, old: bytes, new: bytes) -> Path:
        """The model with one string replaced by another of the same length."""
        whole = MODEL.read_bytes()
        self.assertEqual(len(old), len(new))
        self.assertEqual(whole.count(old), 1)
        path = self.folder / name
        path.write_bytes(whole.replace(old, new))
        return path


class Mistakes(QwenCase):
    def test_command_line(self):
        self.refused(words=("command is needed", "run", "quantize"))
        self.refused("frob", words=("frob", "perplexity"))
        for command in COMMANDS:
            self.refused(command, words=("required", f"qwen {command} --help"))
        for args, word in (
            (("run", MODEL, "a", "b"), "b"),
            (("run", MODEL, "a", "--frob"), "--frob"),
            (("run", MODEL, "a", "-n", "x"), "--n-predict"),
            (("run", MODEL, "a", "--on", "tpu"), "tpu"),
            (("run", MODEL, "a", "-ctk", "q8"), "q8"),
            (("run", MODEL, "a", "-f", "b"), "--file"),
            (("run", MODEL, "a", "--logit-bias", "5"), "--logit-bias"),
            (("run", MODEL, "a", "--logit-bias", "99999999+1"), "99999999"),
            (("run", MODEL, "a", "--system", "b"), "--chat"),
            (("run", MODEL, "a", "-r", ""), "--reverse-prompt"),
            (("bench", MODEL, "-p", "1,x"), "-p"),
            (("bench", MODEL, "-p", "0", "-n", "0"), "nothing to measure"),
            (("bench", MODEL, "--on", "emulator"), "clock"),
            (("bench", MODEL, "--roof", "nan"), "--roof"),
            (("run", MODEL, "-f", "/dev/zero"), "256 MiB"),
            (("perplexity", MODEL, "/dev/zero"), "256 MiB"),
            (("explain", MODEL, "--bandwidth", "fast"), "NAME=GBPS"),
            (("explain", MODEL, "--gates", self.folder), "folder"),
            (("synthetic", "tales", "Q4_0", self.folder / "out.gguf", "--layer-types", ""), "--layer-types"),
            (("tokenize", MODEL, "two", "words"), "quotes"),
            (("tokenize", MODEL, "--decode", "12 99999999"), "99999999"),
            (("quantize", MODEL, self.folder / "out.gguf", "Q9_9"), "Q4_K_M"),
            (("synthetic", "8b", "Q4_0", self.folder / "out.gguf"), "7b"),
        ):
            self.refused(*args, words=(word,))

    def test_sampler_options_are_named(self):
        for option, value in (("--top-p", "nan"), ("--repeat-penalty", "-1"), ("--repeat-last-n", "-2")):
            done = subprocess.run(
                [str(QWEN), "run", str(MODEL), "a", "--on", "cpu", option, value],
                capture_output=True,
                check=False,
                timeout=60,
                stdin=subprocess.DEVNULL,
            )
            self.assertEqual(done.returncode, 2, option)
            self.assertEqual(len(done.stderr.decode().strip().splitlines()), 1, done.stderr)

    def test_files_that_are_not_there(self):
        nowhere = self.folder / "no" / "such"
        for args in (
            ("run", nowhere, "a"),
            ("chat", nowhere),
            ("perplexity", nowhere, nowhere),
            ("perplexity", MODEL, nowhere),
            ("bench", nowhere),
            ("explain", nowhere),
            ("tokenize", nowhere, "a"),
            ("quantize", nowhere, self.folder / "out", "Q4_0"),
            ("run", MODEL, "-f", nowhere),
        ):
            self.refused(*args, words=(str(nowhere),))
        self.refused("run", self.folder, "a", words=("folder",))
        self.refused("quantize", MODEL, nowhere, "Q4_0", words=("no folder",))

    def test_files_that_are_something_else(self):
        text = self.folder / "text.gguf"
        text.write_text("This is no model.\n" * 10)
        self.refused("run", text, "a", status=1, words=(text.name,))
        short = self.folder / "short.gguf"
        short.write_bytes(MODEL.read_bytes()[: MODEL.stat().st_size // 2])
        self.refused("run", short, "a", status=1, words=("short.gguf", "missing"))

        key = b"general.architecture" + struct.pack("<IQ", 8, 5)
        other = self.changed_model("other.gguf", key + b"qwen2", key + b"llama")
        self.refused("run", other, "a", status=1, words=("llama", "qwen2"))
        gone = self.changed_model("gone.gguf", b"blk.0.attn_k.bias", b"blk.0.attn_k.bios")
        self.refused("run", gone, "a", status=1, words=("blk.0.attn_k.bias",))

    def test_quantize_spares_its_input(self):
        copy = self.folder / "model.gguf"
        copy.write_bytes(MODEL.read_bytes())
        link = self.folder / "link.gguf"
        link.symlink_to(copy)
        for out in (copy, link):
            self.refused("quantize", copy, out, "Q4_0", words=("the file that is read",))
        self.assertEqual(copy.read_bytes(), MODEL.read_bytes())

    def test_executors_that_are_not_there(self):
        if not (QWEN.parent / "qwen_cuda").exists():
            self.refused("run", MODEL, "a", "--on", "gpu", words=("--on gpu", "qwen_cuda"))
        elif not Path("/dev/nvidiactl").exists():
            self.refused("run", MODEL, "a", "--on", "gpu", words=("--on gpu", "no GPU"))


class Endings(QwenCase):
    """What ends a program from outside: Ctrl-C, a reader that goes, a full disk, no memory, a lost device."""

    def interrupted(self, *args: object, when: Callable[[], bool], **variables: str) -> subprocess.CompletedProcess:
        """Ctrl-C as soon as `when` is true; the program must end by itself, with status 130."""
        with subprocess.Popen(
            [str(QWEN), *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
        ) as process:
            self.addCleanup(process.kill)
            for _ in range(6000):
                if when() or process.poll() is not None:
                    break
                time.sleep(0.01)
            self.assertIsNone(process.poll(), "it ended before it could be interrupted")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 130, err)
        self.assertIn(b"interrupted", err)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def left(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def writing(self) -> bool:
        return any(".part" in name for name in self.left())

    def test_ctrl_c_while_a_file_is_written(self):
        source = self.folder / "source.gguf"
        self.qwen("synthetic", "0.5b", "F16", source, "--layer-types", "f16")
        out = self.folder / "out.gguf"
        out.write_text("what was there before")
        for args in (("synthetic", "7b", "Q8_0", out), ("quantize", source, out, "Q4_K_M", "-t", 1)):
            done = self.interrupted(*args, when=self.writing)
            self.assertEqual(done.stderr, b"qwen: interrupted\n")
            self.assertEqual((done.stdout, self.left()), (b"", ["out.gguf", "source.gguf"]))
            self.assertEqual(out.read_text(), "what was there before")

    def test_ctrl_c_while_a_model_loads_and_while_it_reads(self):
        # The emulator takes seconds for a load and for every piece of a prompt.
        args = ("run", MODEL, TALE * 4, "--on", "emulator", "-b", 9, "-c", 512)
        for seconds in (0.4, 4.0):
            begin = time.monotonic()
            trace = self.folder / "trace.json"

            def wait(seconds: float = seconds, begin: float = begin) -> bool:
                return time.monotonic() > begin + seconds

            done = self.interrupted(*args, when=wait, LADDER_TRACE=str(trace))
            self.assertLessEqual(len(done.stderr.splitlines()), 3)
            json.loads(trace.read_text())  # whole, whatever is in it

    def at_a_terminal(self, *args: object, when: Callable[[bytes], bool]) -> bytes:
        """Ctrl-C typed at a terminal as soon as `when` is true of what it shows.  The program ends with status 130 and
        leaves the terminal as it was; the bar that shows a load is wiped away.  Returns what was shown."""
        pid, terminal = pty.fork()
        if pid == 0:
            try:
                os.execv(QWEN, [str(QWEN), *map(str, args)])
            finally:
                os._exit(127)
        shown, typed, before = b"", False, termios.tcgetattr(terminal)
        limit = time.monotonic() + 120
        while time.monotonic() < limit:
            if select.select([terminal], [], [], 0.01)[0]:
                try:
                    piece = os.read(terminal, 65536)
                except OSError:  # the program has ended
                    break
                shown += piece
            if not typed and when(shown):
                os.write(terminal, b"\x03")
                typed = True
        after = termios.tcgetattr(terminal)
        os.kill(pid, 0 if time.monotonic() < limit else signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
        self.assertTrue(typed, shown)
        self.assertEqual((status, after), (130, before), shown)
        self.assertIn(b"interrupted", shown.split(b"\x1b[K")[-1], shown)
        return shown

    def test_ctrl_c_at_a_terminal(self):
        prompt = self.folder / "prompt.txt"
        prompt.write_text(TALE * 2000)
        models = {"cpu": MODEL}
        if gpu():
            models["gpu"] = self.folder / "model.gguf"
            self.qwen("synthetic", "0.5b", "Q4_0", models["gpu"])
        for on, model in models.items():
            generating = ("run", model, "Once", "--ignore-eos", "--no-display-prompt", "--on", on)
            shown = self.at_a_terminal(*generating, when=lambda seen: len(seen.split(b"\x1b[K")[-1]) > 60)
            self.assertIn(b"stopped: interrupted", shown)
            reading = ("run", model, "-f", prompt, "--no-display-prompt", "--on", on, "-c", 400000, "-n", 1)
            shown = self.at_a_terminal(*reading, when=lambda seen: seen.endswith(b"\x1b[K"))
            self.assertIn(b"prompt: 0 tokens", shown)
        # The emulator takes seconds for a load, so that it is still at it.
        for on, model in {**models, "emulator": MODEL}.items():
            if on != "cpu":
                loading = ("run", model, "Once", "--ignore-eos", "--on", on)
                self.at_a_terminal(*loading, when=lambda seen: b" %" in seen)

    @unittest.skipUnless(gpu(), "no GPU that CUDA can use")
    def test_what_is_said_to_fit_a_gpu_fits_it(self):
        model = self.folder / "model.gguf"
        self.qwen("synthetic", "0.5b", "Q4_0", model)
        run = ("run", model, "Once", "-n", 2, "--on", "gpu", "-c")
        said = self.qwen(*run, 16_000_000, status=1).stderr.decode()
        found = re.search(r"bytes of device memory .* are free; -c (\d+) would fit\n$", said)
        assert found, said
        context = int(found[1])
        self.qwen(*run, context - context // 50)  # a GPU's free memory is not all ours
        self.assertIn("would fit", self.qwen(*run, context + context // 50, status=1).stderr.decode())

    def test_ctrl_c_ends_a_bench_with_a_whole_report(self):
        args = ("bench", MODEL, "--on", "cpu", "-t", 1, "-p", "8", "-n", "100000", "-o", "json")
        begin = time.monotonic()
        done = self.interrupted(*args, when=lambda: time.monotonic() > begin + 2)
        self.assertEqual([row["n_prompt"] for row in json.loads(done.stdout)], [8])

    def test_a_reader_that_goes(self):
        for args in (("explain", MODEL), ("run", MODEL, "Once", "-n", 40, "--ignore-eos", "--on", "cpu")):
            read, write = os.pipe()
            os.close(read)
            done = subprocess.run(
                [str(QWEN), *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=subprocess.PIPE,
                check=False,
            )
            os.close(write)
            self.assertEqual((done.returncode, done.stderr), (141, b""), args)

    def test_a_full_disk(self):
        for args in (("explain", MODEL), ("--help",), ("--version",), ("run", "--help")):
            with Path("/dev/full").open("wb") as full:
                done = subprocess.run([str(QWEN), *map(str, args)], stdout=full, stderr=subprocess.PIPE, check=False)
            self.assertEqual(done.returncode, 1, args)
            self.assertEqual(done.stderr, b"qwen: writing to stdout failed: No space left on device\n")
        out = self.folder / "out.gguf"
        for args in (("synthetic", "tales", "Q8_0", out), ("quantize", MODEL, out, "Q8_0")):
            done = subprocess.run(
                [str(QWEN), *map(str, args)],
                capture_output=True,
                check=False,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
            )
            self.assertEqual(done.returncode, 1, args)
            self.assertRegex(done.stderr.decode(), r"^qwen: .*out\.gguf: cannot be written beyond byte \d+: .*\n$")
            self.assertEqual((done.stdout, self.left()), (b"", []))

    def emulated(self, *args: object, status: int, **variables: str) -> str:
        command = [str(QWEN), "run", str(MODEL), "Once upon", "-n", "2", "--on", "emulator", *map(str, args)]
        done = subprocess.run(
            command, capture_output=True, check=False, stdin=subprocess.DEVNULL, env={**os.environ, **variables}
        )
        said = done.stderr.decode()
        self.assertEqual(done.returncode, status, said)
        if status:
            self.assertEqual(len(said.splitlines()), 1, said)
        return said

    def test_a_trace_that_cannot_be_written(self):
        said = self.emulated("-c", 64, status=1, LADDER_TRACE="/dev/full")
        self.assertEqual(said, "qwen: LADDER_TRACE: writing /dev/full failed\n")
        self.assertIn(
            "cannot write", self.emulated("-c", 64, status=1, LADDER_TRACE=str(self.folder / "no" / "t.json"))
        )

    def test_a_model_that_does_not_fit(self):
        little = {"LADDER_EMULATOR_MEMORY": "40000000"}
        said = self.emulated("-c", 2048, "-ctk", "f32", status=1, **little)
        found = re.search(r"bytes of device memory .* 40000000 are free; -c (\d+) would fit$", said)
        assert found, said
        context = int(found[1])
        self.assertTrue(16 <= context < 2048, said)
        self.emulated("-c", context, "-ctk", "f32", status=0, **little)
        self.assertIn("would fit", self.emulated("-c", 2 * context, "-ctk", "f32", status=1, **little))
        said = self.emulated("-c", 64, status=1, LADDER_EMULATOR_MEMORY="1000000")
        self.assertRegex(said, r"with any context it would have to be \d+ bytes smaller: quantized")
        self.assertIn("'1k' is not a whole number", self.emulated(status=2, LADDER_EMULATOR_MEMORY="1k"))

    def test_a_device_that_is_lost(self):
        # While weights become tiles, in the prompt, between two tokens; with a trace that is whole all the same.
        trace = self.folder / "trace.json"
        for launches in (3, 60, 100):
            more = {"LADDER_EMULATOR_LAUNCHES": str(launches), "LADDER_TRACE": str(trace)}
            said = self.emulated("-c", 64, status=1, **more)
            self.assertRegex(said, r"^qwen: .*: the device was lost")
            json.loads(trace.read_text())


class Help(QwenCase):
    def test_everywhere(self):
        self.assertRegex(self.text("--version"), r"^qwen \d+\.\d+\.\d+ ")
        whole = self.text("--help")
        for command in COMMANDS:
            self.assertIn(command, whole)
            self.assertIn("Usage: qwen " + command, self.text(command, "--help"))


class Run(QwenCase):
    def test_prompt_and_continuation(self):
        report = self.generated("Once upon a time", "-n", 12)
        self.assertEqual(report["prompt"], "Once upon a time")
        self.assertEqual(report["executor"], "cpu")
        self.assertGreater(len(report["tokens"]), 0)
        plain = self.text("run", MODEL, "Once upon a time", "-n", 12, "--on", "cpu", "--temp", 0)
        self.assertEqual(plain.rstrip("\n"), ("Once upon a time" + report["text"]).rstrip("\n"))
        alone = self.text("run", MODEL, "Once upon a time", "-n", 12, "--on", "cpu", "--temp", 0, "--no-display-prompt")
        self.assertEqual(alone.rstrip("\n"), report["text"].rstrip("\n"))

    def test_prompts_from_files_and_stdin(self):
        wanted = self.generated(TALE.strip(), "-n", 6)
        path = self.folder / "prompt.txt"
        path.write_text(TALE.strip() + "\n")
        for args, stdin in (
            (("-f", path), b""),
            (("-",), TALE.strip() + "\n"),
            ((), TALE.strip()),
        ):
            report = self.generated(*args, "-n", 6, stdin=stdin)
            self.assertEqual(report["prompt_tokens"], wanted["prompt_tokens"], args)
            self.assertEqual(report["tokens"], wanted["tokens"], args)

    def test_empty_prompt_begins_a_text(self):
        report = self.generated("", "-n", 4)
        begin = self.json("tokenize", MODEL, "<|endoftext|>", "--parse-special")["tokens"]
        self.assertEqual(report["prompt_tokens"], begin)
        self.assertEqual(len(begin), 1)
        self.assertEqual(self.generated("-n", 4)["tokens"], report["tokens"])  # stdin at its end

    def test_one_token_prompt(self):
        report = self.generated("a", "-n", 3, "--ignore-eos")
        self.assertEqual(len(report["prompt_tokens"]), 1)
        self.assertEqual(len(report["tokens"]), 3)
        self.assertEqual(report["stop"], "limit")

    def test_no_tokens_wanted(self):
        report = self.generated("Once", "-n", 0)
        self.assertEqual((report["text"], report["tokens"]), ("", []))

    def test_long_prompt(self):
        one, two = (self.json("tokenize", MODEL, TALE * n)["count"] for n in (1, 2))
        text = TALE * (2000 // (two - one))
        report = self.generated("-", "-n", 4, "--ignore-eos", "-c", 2048, stdin=text)
        self.assertGreaterEqual(len(report["prompt_tokens"]), 1980)
        self.assertEqual(len(report["tokens"]), 4)
        # Prefill in other pieces is the same computation.
        pieces = self.generated("-", "-n", 4, "--ignore-eos", "-c", 2048, "-b", 100, "-ctk", "f32", stdin=text)
        self.assertEqual(len(pieces["tokens"]), 4)

    def test_full_context(self):
        report = self.generated("Once upon a time", "-c", 16, "--ignore-eos")
        self.assertEqual(report["stop"], "context_full")
        self.assertEqual(len(report["prompt_tokens"]) + len(report["tokens"]), 17)
        self.refused(
            "run", MODEL, TALE * 3, "-c", 16, "--on", "cpu", "--no-display-prompt", status=1, words=("16", "-c")
        )

    def test_stop_strings(self):
        free = self.generated("Once upon a time", "-n", 24, "--ignore-eos")
        stop = free["text"][6:9]
        report = self.generated("Once upon a time", "-n", 24, "--ignore-eos", "-r", stop)
        self.assertEqual(report["stop"], "stop_string")
        self.assertEqual(report["text"], free["text"][: free["text"].index(stop)])

    def test_seed_and_bias(self):
        args = ("run", MODEL, "Once", "-n", 16, "--on", "cpu", "--ignore-eos", "--temp", "1.5")
        first, again = self.json(*args, "-s", 7), self.json(*args, "-s", 7)
        self.assertEqual(first["seed"], 7)
        self.assertEqual(first["tokens"], again["tokens"])
        self.assertNotEqual(first["tokens"], self.json(*args, "-s", 8)["tokens"])
        wanted = first["tokens"][0]
        self.assertEqual(set(self.generated("Once", "-n", 3, "--logit-bias", f"{wanted}+1000")["tokens"]), {wanted})
        greedy = self.generated("Once", "-n", 1)["tokens"]
        self.assertNotEqual(self.generated("Once", "-n", 1, "--logit-bias", f"{greedy[0]}-inf")["tokens"], greedy)

    def test_threads_and_batch_do_not_change_greedy_tokens(self):
        wanted = self.generated(TALE, "-n", 16, "--ignore-eos", "-t", 1)["tokens"]
        self.assertEqual(self.generated(TALE, "-n", 16, "--ignore-eos", "-t", 2)["tokens"], wanted)

    def test_the_emulator_agrees_with_the_cpu(self):
        wanted = self.generated("Once upon", "-n", 3, "--ignore-eos", "--exact")["tokens"]
        report = self.json(
            "run", MODEL, "Once upon", "-n", 3, "--ignore-eos", "--temp", 0, "--on", "emulator", "-c", 16
        )
        self.assertEqual(report["executor"], "emulator")
        self.assertEqual(report["tokens"], wanted)

    def test_one_turn_of_a_conversation(self):
        report = self.generated("Hello", "-n", 4, "--chat", "--system", "Be brief.")
        decoded = self.text("tokenize", MODEL, "--decode", "-", stdin=str(report["prompt_tokens"]))
        self.assertEqual(
            decoded,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        )

    def test_ctrl_c_ends_it_with_what_was_printed(self):
        command = [QWEN, "run", MODEL, "Once upon", "--ignore-eos", "-c", "2048", "--on", "cpu", "-t", "1"]
        with subprocess.Popen(map(str, command), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            self.addCleanup(process.kill)
            begun = os.read(process.stdout.fileno(), 9)
            while len(begun) < 30:
                begun += os.read(process.stdout.fileno(), 64)
            process.send_signal(signal.SIGINT)
            rest, said = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, said)
        self.assertTrue((begun + rest).decode().startswith("Once upon"))
        self.assertIn(b"interrupted", said)


class Chat(QwenCase):
    def chat(self, lines: str, *args: object, status: int = 0) -> tuple[str, str]:
        done = self.qwen("chat", MODEL, "--on", "cpu", "--temp", "0", *args, stdin=lines, status=status)
        return done.stdout.decode(), done.stderr.decode()

    def tokens_read(self, said: str) -> list[int]:
        return [int(n) for n in re.findall(r"\((\d+) tokens read", said)]

    def test_turns_read_only_what_is_new(self):
        _, said = self.chat("Hello\nAnd you?\nReally?\n", "-n", 8, "--perf")
        read = self.tokens_read(said)
        self.assertEqual(len(read), 3, said)
        turn = "<|im_end|>\n<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\n"
        new = len(self.json("tokenize", MODEL, turn, "--parse-special")["tokens"])
        self.assertIn(read[2] - new, (0, 1))  # and the last token of the answer before, which was not evaluated yet
        position = [int(n) for n in re.findall(r"(\d+) of \d+ in the context", said)]
        self.assertEqual(sorted(position), position)

    def test_clear_forgets(self):
        out, said = self.chat("Hello\n/clear\nHello\n", "-n", 8, "--perf")
        read = self.tokens_read(said)
        self.assertEqual(read[0], read[1])
        half = len(out) // 2
        self.assertEqual(out[:half], out[half:])

    def test_commands(self):
        out, said = self.chat("/help\n/nonsense\n\n/exit\nnever read\n", "--perf")
        self.assertIn("/clear", out)
        self.assertIn("/nonsense", said)
        self.assertEqual(self.tokens_read(said), [])

    def test_continued_lines_and_no_last_newline(self):
        _, said = self.chat("one\\\ntwo", "-n", 2, "--perf")
        self.assertEqual(len(self.tokens_read(said)), 1)

    def test_full_context_is_said(self):
        out, said = self.chat("Hello\nmore\n/clear\nHello\n", "-c", 48, "--ignore-eos", "--system", "Hi.", status=1)
        self.assertIn("full", said)
        self.assertIn("not answered", said)
        self.assertIn("/clear", said)
        first = out.splitlines()[0]
        self.assertEqual(out.count(first), 2, "the answer after /clear is that of a new conversation")

    def test_ctrl_c_stops_the_answer_not_the_program(self):
        command = [QWEN, "chat", MODEL, "--on", "cpu", "-t", "1", "--ignore-eos", "-c", "2048"]
        with subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            self.addCleanup(process.kill)
            process.stdin.write(b"Tell me a story\n")
            process.stdin.flush()
            self.assertTrue(os.read(process.stdout.fileno(), 1))
            process.send_signal(signal.SIGINT)
            self.assertIn(b"stopped", process.stderr.readline())
            process.stdin.write(b"/help\n")
            process.stdin.flush()
            seen = b""
            while b"/exit" not in seen:
                seen += os.read(process.stdout.fileno(), 4096)
            time.sleep(0.3)  # it waits for the next line now
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(timeout=60), 130)


class Perplexity(QwenCase):
    def test_finite_and_stated(self):
        path = self.folder / "text.txt"
        path.write_text(TALE * 20)
        report = self.json("perplexity", MODEL, path, "-c", 64, "--on", "cpu")
        self.assertTrue(math.isfinite(report["perplexity"]) and report["perplexity"] >= 1)
        self.assertTrue(math.isfinite(report["standard_error"]) and report["standard_error"] >= 0)
        self.assertEqual(report["windows"], report["text_tokens"] // 64)
        self.assertEqual(report["counted_tokens"], report["windows"] * 31)
        self.assertAlmostEqual(math.log(report["perplexity"]), report["mean_nll"], places=5)
        other = self.json("perplexity", MODEL, "-", "-c", 64, "--on", "cpu", "-b", 7, stdin=path.read_bytes())
        self.assertAlmostEqual(other["mean_nll"], report["mean_nll"], places=3)
        text = self.text("perplexity", MODEL, path, "-c", 64, "--on", "cpu", "--chunks", 2)
        self.assertIn("2 windows of 64 tokens", text)

    def test_too_short(self):
        self.refused(
            "perplexity", MODEL, "-", "--on", "cpu", stdin="short", words=("fewer than one window of 512", "-c")
        )


class Tokenize(QwenCase):
    def test_round_trip(self):
        for text in ("Hello, world!", "a   b\n\n\tc", "naïve café 日本 😀", "", "  trailing  "):
            ids = self.json("tokenize", MODEL, "-", stdin=text)["tokens"]
            self.assertEqual(self.text("tokenize", MODEL, "--decode", "-", stdin=str(ids)), text)
            if text:
                self.assertEqual(self.text("tokenize", MODEL, text, "--ids").split(), [str(i) for i in ids])

    def test_lines(self):
        lines = self.text("tokenize", MODEL, "a\nb").splitlines()
        self.assertTrue(all(re.fullmatch(r" *\d+  '.*'", line) for line in lines), lines)
        self.assertIn("\\n", "".join(lines))

    def test_special(self):
        plain = self.json("tokenize", MODEL, "<|im_end|>")
        special = self.json("tokenize", MODEL, "<|im_end|>", "--parse-special")
        self.assertGreater(plain["count"], 1)
        self.assertEqual(special["pieces"], ["<|im_end|>"])

    def test_nfc(self):
        nfd = "cafe\u0301"
        self.assertTrue(self.json("tokenize", MODEL, nfd)["normalized"])
        self.assertEqual(
            self.text("tokenize", MODEL, "--decode", "-", stdin=self.text("tokenize", MODEL, nfd, "--ids")), "café"
        )
        ids = self.text("tokenize", MODEL, nfd, "--ids", "--no-nfc")
        self.assertEqual(self.text("tokenize", MODEL, "--decode", "-", stdin=ids), nfd)


class Files(QwenCase):
    def test_every_type_runs(self):
        listed = self.qwen("quantize", MODEL, self.folder / "x", "nothing", status=2).stderr.decode()
        types = listed.split("known: ")[1].strip().split(", ")
        self.assertGreaterEqual(len(types), 15)
        before = self.json("explain", MODEL)
        for name in types:
            with self.subTest(name):
                out = self.folder / f"{name}.gguf"
                said = self.text("quantize", MODEL, out, name.lower())
                self.assertIn("MB", said)
                census = self.json("explain", out)
                self.assertEqual(census["parameters"], before["parameters"])
                if name not in ("F32", "F16", "BF16"):
                    self.assertLess(census["tensor_bytes"], before["tensor_bytes"])
                report = self.json("run", out, "Once upon", "-n", 4, "--on", "cpu", "--ignore-eos", "--temp", 0)
                self.assertEqual(len(report["tokens"]), 4)
                out.unlink()

    def test_explain(self):
        report = self.json("explain", MODEL, "--bandwidth", "mine=100")
        ceilings = {c["device"]: c for c in report["ceilings"]}
        self.assertIn("NVIDIA H200", ceilings)
        self.assertAlmostEqual(
            ceilings["mine"]["tokens_per_second"], 100e9 / report["bytes_per_token"], delta=1e-6 * 100e9
        )
        self.assertEqual(sum(t["bytes"] for t in report["types"]), report["tensor_bytes"])
        text = self.text("explain", MODEL)
        self.assertIn("NVIDIA H200", text)
        header = self.folder / "header.gguf"
        header.write_bytes(MODEL.read_bytes()[: MODEL.stat().st_size // 2])
        self.assertEqual(self.json("explain", header)["tensor_bytes"], report["tensor_bytes"])


class Dispatch(QwenCase):
    def test_a_device_has_its_own_gates(self):
        for path in sorted((ROOT / "data" / "gates").glob("*.json")):
            report = self.json("explain", MODEL, "--device", path.stem)
            self.assertEqual(report["gates"], path.stem)
            names = {gate["name"] for gate in json.loads(path.read_text())["gates"]}
            self.assertTrue({at["gate"] for m in report["dispatch"] for at in m["at"]} <= names)
        self.assertEqual(self.json("explain", MODEL, "--device", "nvidia-l4")["gates"], "default")

    def test_explain_says_which_kernel(self):
        report = self.json("explain", MODEL, "--device", "nvidia-h200", "--gates", "default")
        self.assertEqual(report["gates"], "default")
        matrices = {m["tensor"]: m for m in report["dispatch"]}
        self.assertEqual(len(matrices), 7 * report["layers"] + 1)
        at = {a["nt"]: a for a in matrices["blk.0.attn_q.weight"]["at"]}
        self.assertEqual(sorted(at), [1, 8, 512])
        self.assertEqual(at[1]["kernel"], "gemv_fused")
        self.assertEqual(at[8]["kernel"], "f16_f32_matmul")
        self.assertAlmostEqual(at[8]["margin"], 9 / 8, places=6)
        self.assertEqual(at[512]["gate"], "prefill.f16_weights_wgmma")
        text = self.text("explain", MODEL, "--nt", "9", "--reasons", "--show-gates", "--device", "nvidia-gb10")
        self.assertIn("prefill.f16_weights_mma", text)
        self.assertIn("it needs compute capability 9.0, here 12.1", text)
        self.assertIn("gates 'default', the first that takes a shape decides:", text)
        self.assertIn(
            "no device 'abacus'; there are ",
            self.qwen("explain", MODEL, "--device", "abacus", status=2).stderr.decode(),
        )

    def test_switches(self):
        help_text = self.text("--help")
        for name in ("LADDER_MMQ=0|1", "LADDER_GEMM_TM=64|128", "LADDER_TRACE=FILE", "LADDER_GATES=FILE"):
            self.assertIn(name, help_text)
        for name, value, said in (
            ("LADDER_MMQ", "2", "LADDER_MMQ must be 0 or 1, not '2'"),
            ("LADDER_GEMM_TM", "65", "LADDER_GEMM_TM must be 64 or 128, not '65'"),
            ("LADDER_GATES", "/no/such.json", "gates /no/such.json: the file cannot be read"),
        ):
            with self.subTest(name), mock.patch.dict(os.environ, {name: value}):
                error = self.qwen("explain", MODEL, status=2).stderr.decode()
                self.assertEqual(error, f"qwen: {said}\n")

    def test_trace(self):
        trace = self.folder / "trace.json"
        with mock.patch.dict(os.environ, {"LADDER_TRACE": str(trace)}):
            report = self.json(
                "run", MODEL, "Once upon a time there was a wolf", "-n", 3, "--on", "emulator", "--temp", 0
            )
        events = [e for e in json.loads(trace.read_text()) if e["ph"] == "X"]
        products = [e for e in events if e["cat"] == "multiply"]
        layers = self.json("explain", MODEL)["layers"]
        prompt = [e for e in products if e["args"]["nt"] > 1]
        self.assertEqual(len(prompt), 7 * layers)
        for event in products:
            for name in ("weights", "type", "nt", "od", "id", "tier", "gate", "bytes", "ops"):
                self.assertIn(name, event["args"])
            self.assertNotIn("percent_of_roof", event["args"])  # the emulator has no clock
        times = [e["ts"] for e in events]
        self.assertEqual(times, sorted(times))
        self.assertTrue(all(e["dur"] >= 0 for e in events))
        plain = self.json("run", MODEL, "Once upon a time there was a wolf", "-n", 3, "--on", "emulator", "--temp", 0)
        self.assertEqual(plain["tokens"], report["tokens"])


class Bench(QwenCase):
    ARGS = ("bench", MODEL, "-p", "8", "-n", "4", "-pg", "4,2", "-d", "0,5", "-r", "2", "--on", "cpu", "-t", "1")
    TESTS = ("pp8", "tg4", "pp4+tg2", "pp8 @ d5", "tg4 @ d5", "pp4+tg2 @ d5")

    def test_table(self):
        rows = [line for line in self.text(*self.ARGS).splitlines() if line.startswith("| qwen2")]
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        self.assertEqual(tuple(row[5] for row in cells), self.TESTS)
        for row in cells:
            self.assertRegex(row[6], r"^\d+\.\d\d ± \d+\.\d\d$")
            self.assertEqual(row[8] != "-", row[5].startswith("tg"))

    def test_other_forms(self):
        parsed = json.loads(self.text(*self.ARGS, "-o", "json"))
        lines = [json.loads(line) for line in self.text(*self.ARGS, "-o", "jsonl").splitlines()]
        table = list(csv.DictReader(io.StringIO(self.text(*self.ARGS, "-o", "csv"))))
        for rows in (parsed, lines):
            self.assertEqual(len(rows), 6)
            for row in rows:
                self.assertEqual(len(row["samples_ts"]), 2)
                self.assertAlmostEqual(row["avg_ts"], sum(row["samples_ts"]) / 2, places=2)
        self.assertEqual([int(row["n_prompt"]) for row in table], [row["n_prompt"] for row in parsed])
        self.assertGreater(float(table[1]["percent_of_roof"]), 0)

    def test_records(self):
        found = [json.loads(line) for line in self.text(*self.ARGS, "-o", "record").splitlines()]
        self.assertEqual([r["test"] for r in found], [name.replace(" ", "") for name in self.TESTS])
        for record in found:
            self.assertEqual(records.problems(record), [])
            self.assertEqual(record["rung"], "engine")


if __name__ == "__main__":
    unittest.main()
