"""Load on a Tinker server: many clients at once, and kill -9 of the server with its ranks in the middle.

    .venv/bin/python scripts/load_server.py                                  64 clients for ten minutes
    .venv/bin/python scripts/load_server.py --clients 5 --minutes 0.5        a short one

One client trains. The others sample from the base model, from saved weights and from the weights in training (over HTTP,
as OpenAI's clients do), and compute log-probs. The server is killed after half of the time and started again on the same
database. Then one client of a server that nobody disturbs does the same training steps.

It fails unless every request has one answer, the database has the trainer's steps and no failed request, and the final
weights are those of the undisturbed server, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from load_clients import END, Settings

from hybridengine.bench.serve.measure import server_sections
from hybridengine.bench.serve.server import KEY, MODEL, ServerProcess
from hybridengine.bench.serve.spec import ServeSpec
from hybridengine.bench.step.own import prepare_step
from hybridengine.bench.step.spec import StepSpec
from hybridengine.cli.options import between
from hybridengine.formatting import format_bytes, table
from hybridengine.machine import machine_figures
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.sizes import GenSizes, TrainSizes

START_S, END_S = 600.0, 900.0
"""Longest start of a server, and longest wait for the last answers."""
CLIENTS_PER_PROCESS = 16
OTHERS = ("sample_base", "score", "sample_base", "complete", "sample_saved")
"""Kinds of the clients that do not train, in turn."""
SAMPLE_S = 5.0
"""Time between two looks at the memory."""
COLUMNS = {
    "kind": "request",
    "count": "answers",
    "p50_s": "p50",
    "p95_s": "p95",
    "p99_s": "p99",
    "max_s": "slowest",
}


class Memory:
    """Resident bytes of the server's process and of its ranks, over time."""

    def __init__(self, server: ServerProcess) -> None:
        self.samples: list[tuple[float, int, int]] = []
        self._server, self._begin_s, self._ended = server, time.time(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                own, ranks = 0, 0
                for place, process in enumerate(self._server.processes()):
                    is_rank = process.name().startswith("ray::")
                    own += process.memory_info().rss if place == 0 else 0
                    ranks += process.memory_info().rss if is_rank else 0
                if own:
                    self.samples.append((time.time() - self._begin_s, own, ranks))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def start_clients(settings: Sequence[Settings]) -> list[subprocess.Popen[bytes]]:
    """Start a process for each of the settings."""
    processes = []
    for each in settings:
        file = Path(each.folder, f"clients-{each.name}.json")
        file.write_text(json.dumps(asdict(each)))
        with file.with_suffix(".log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("load_clients.py")), str(file)],
                    stdout=log,
                    stderr=log,
                    env=os.environ
                    | {"TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"},
                )
            )
    return processes


def wait_for(processes: Sequence[subprocess.Popen[bytes]], settings: Sequence[Settings]) -> list[str]:
    """Return a problem for each process of clients that has failed or does not end."""
    problems, deadline = [], time.monotonic() + END_S
    for process, each in zip(processes, settings, strict=True):
        try:
            status = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = "killed: it did not end"
        if status != 0:
            log = Path(each.folder, f"clients-{each.name}.log").read_text(errors="replace")
            problems.append(f"clients {each.name}: status {status}\n{log[-2000:]}")
    return problems


def read_journals(
    folder: Path,
) -> tuple[dict[str, dict[str, Any]], Counter[str], list[dict[str, Any]], Counter[str]]:
    """Return requests by number, the number of answers of each, the answers, and how many of a kind were sent again."""
    sent: dict[str, dict[str, Any]] = {}
    answered, again, answers = Counter[str](), Counter[str](), list[dict[str, Any]]()
    for file in sorted(folder.glob("answers-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            if "again" in line:
                again[line["again"]] += 1
            elif "answered_s" in line:
                answered[line["request"]] += 1
                answers.append(line)
            else:
                sent[line["request"]] = line
    return sent, answered, answers, again


def stored_requests(database: Path) -> dict[str, dict[str, int]]:
    """Return kind -> state -> number of the requests in the database."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        for kind, state, number in connection.execute(
            "SELECT kind, state, COUNT(*) FROM requests GROUP BY 1, 2"
        ):
            found[kind][state] = number
    return found


def latencies(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return percentiles of the seconds from request to answer, by kind."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for line in answers:
        seconds[line["kind"]].append(line["answered_s"] - line["sent_s"])
    return [
        {
            "kind": kind,
            "count": len(found),
            **{f"p{share}_s": float(np.percentile(found, share)) for share in (50, 95, 99)},
            "max_s": max(found),
        }
        for kind, found in sorted(seconds.items())
    ]


def weights_digest(server: ServerProcess, path: str) -> str:
    """Return the SHA-256 of weights that the server has saved under a tinker:// path."""
    return hashlib.sha256((server.saved(path) / "model.safetensors").read_bytes()).hexdigest()


def growth(
    samples: Sequence[tuple[float, int, int]], column: int, begin_s: float, end_s: float
) -> float | None:
    """Return the growth of memory between the second and the last quarter of a time, as a share; None without samples."""
    quarter = (end_s - begin_s) / 4
    early = [one[column] for one in samples if begin_s + quarter < one[0] < begin_s + 2 * quarter]
    late = [one[column] for one in samples if end_s - quarter < one[0] < end_s]
    return float(np.mean(late) / np.mean(early) - 1) if early and late else None


@contextlib.contextmanager
def ended(server: ServerProcess) -> Iterator[ServerProcess]:
    """Kill what is left of a server on exit."""
    try:
        yield server
    finally:
        server.stop()


def trained(folder: Path, name: str) -> dict[str, Any]:
    """Return the report of a trainer."""
    return json.loads((folder / f"trained-{name}.json").read_text())


def run_load(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Do the load and the undisturbed training, and return figures and `problems`."""
    folder: Path = options.folder.resolve()
    spec = ServeSpec(8, 32, options.parallel, options.generate, 1, START_S)
    work = StepSpec(spec.num_samples, 1, spec.response_tokens, "float32", 1, START_S)
    files = prepare_step(options.config, work, folder)
    sections = server_sections(spec, files)
    shared = {
        "folder": str(folder),
        "key": KEY,
        "model": MODEL,
        "vocabulary_size": ModelShape.from_folder(files.model).vocab_size,
    }
    say(f"starting a server for {options.clients} clients")
    with ended(ServerProcess(folder / "disturbed", sections, START_S)) as server:
        server.start()
        begin_s = time.time()
        memory = Memory(server)
        others = [OTHERS[place % len(OTHERS)] for place in range(options.clients - 1)]
        settings = [Settings("trainer", kinds=["train"], first=0, url=server.url, **shared)] + [
            Settings(
                f"others{first}",
                kinds=others[first : first + CLIENTS_PER_PROCESS],
                first=1 + first,
                url=server.url,
                **shared,
            )
            for first in range(0, len(others), CLIENTS_PER_PROCESS)
        ]
        processes = start_clients(settings)
        time.sleep(30 * options.minutes)
        say("kill -9 of the server and its ranks")
        killed_s = time.time()
        server.kill()
        server.start()
        restarted_s = time.time()
        say(f"it listens again after {restarted_s - killed_s:.1f} s")
        time.sleep(30 * options.minutes)
        end_s = time.time()
        (folder / END).touch()
        problems = wait_for(processes, settings)
        memory.end()
        say("all clients have ended")
        database = server.run_folder / "server.db"
        database_bytes = sum(file.stat().st_size for file in database.parent.glob("server.db*"))
        stored = stored_requests(database)
        report = trained(folder, "trainer") if not problems else {}
        digest = weights_digest(server, report["path"]) if report else None
    sent, answered, answers, again = read_journals(folder)
    if report:
        alone = Settings("alone", kinds=["train"], first=0, url="", steps=report["steps"], **shared)
        alone_digest = undisturbed(folder, sections, alone, say)
        problems += [] if alone_digest == digest else ["the final weights differ from those without the kill"]
    problems += lost(sent, answered, stored, report)
    times = sorted(line["answered_s"] for line in answers)
    gaps = [after - before for before, after in pairwise(times)]
    lives = {"before": (0.0, killed_s - begin_s), "after": (restarted_s - begin_s, end_s - begin_s)}
    return {
        "clients": options.clients,
        "minutes": options.minutes,
        "kinds": dict(Counter(["train", *others])),
        "requests_sent": len(sent),
        "requests_answered": sum(answered.values()),
        "sent_again": dict(again),
        "steps": report.get("steps"),
        "weights_sha256": digest,
        "requests_per_s": len(times) / (times[-1] - times[0]) if len(times) > 1 else None,
        "restart_s": restarted_s - killed_s,
        "longest_outage_s": max(gaps, default=None),
        "latencies": latencies(answers),
        "stored": stored,
        "database_bytes": database_bytes,
        "memory_growth_share": {
            f"{name} {life}": growth(memory.samples, column, *bounds)
            for life, bounds in lives.items()
            for name, column in (("server", 1), ("ranks", 2))
        },
        "memory_samples": memory.samples,
        "machine": machine_figures(),
        "problems": problems,
    }


def undisturbed(folder: Path, sections: Mapping[str, Any], settings: Settings, say: Say) -> str:
    """Return the digest of the weights after the same steps on a server with one client."""
    say(f"the same {settings.steps} steps on a server with one client")
    with ended(ServerProcess(folder / "undisturbed", sections, START_S)) as server:
        server.start()
        chosen = Settings(**{**asdict(settings), "url": server.url, "folder": str(folder / "undisturbed")})
        problems = wait_for(start_clients([chosen]), [chosen])
        if problems:
            raise SystemExit("\n".join(problems))
        return weights_digest(server, trained(folder / "undisturbed", "alone")["path"])


def lost(
    sent: Mapping[str, Any],
    answered: Counter[str],
    stored: Mapping[str, Mapping[str, int]],
    report: Mapping[str, Any],
) -> list[str]:
    """Return what is wrong with the answers and with the requests in the database."""
    problems = []
    wrong = [number for number in sent if answered[number] != 1]
    if wrong:
        problems.append(
            f"{len(wrong)} of {len(sent)} requests do not have one answer, such as {sent[wrong[0]]}"
        )
    for kind, states in stored.items():
        # an HTTP request that was open when the server was killed fails in the database, and its client sends it again
        bad = {state: number for state, number in states.items() if state != "done" and kind != "prompt"}
        if bad:
            problems.append(f"the database has requests of the kind {kind} that are {bad}")
    for kind in ("forward_backward", "optim_step"):
        if report and stored.get(kind) != {"done": report["steps"]}:
            problems.append(
                f"the trainer has made {report['steps']} steps, the database has {kind}: {stored.get(kind)}"
            )
    samples = sum("sample " in line["kind"] or line["kind"] == "compute_logprobs" for line in sent.values())
    if stored.get("sample", {}).get("done") != samples:
        problems.append(
            f"clients have sent {samples} requests for samples, the database has {stored.get('sample')}"
        )
    return problems


def result_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of latencies, followed by notes."""
    shares = ", ".join(
        f"{name} {share:+.1%}" for name, share in figures["memory_growth_share"].items() if share is not None
    )
    return [
        f"{figures['clients']} clients, {figures['minutes']:g} minutes: {figures['requests_sent']} requests sent,"
        f" {figures['requests_answered']} answered, {figures['requests_per_s'] or 0:.1f} a second,"
        f" {figures['steps']} training steps",
        *table(figures["latencies"], COLUMNS),
        f"kill -9: listening again after {figures['restart_s']:.1f} s, longest time without an answer"
        f" {figures['longest_outage_s'] or 0:.1f} s; sent again over HTTP: {figures['sent_again']}",
        f"memory: {shares}; database {format_bytes(figures['database_bytes'])}",
        *(
            figures["problems"]
            or ["nothing was lost, and the final weights are those without the kill, bit for bit"]
        ),
    ]


class Say:
    """Prints text with the time since the beginning."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:6.1f}s] {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the load; return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--clients", type=between(2, 1024), default=64, help="one trains (default 64)")
    option("--minutes", type=between(0.1, 1440, float), default=10.0, help="besides the restart (default 10)")
    option("--config", default="configs/bench-small.yaml", help="configuration with the model")
    option("--parallel", type=TrainSizes.parse, default="1-2-1", help="sizes of training (default 1-2-1)")
    option("--generate", type=GenSizes.parse, default="1-1", help="sizes of generation (default 1-1)")
    option("--folder", type=Path, default=Path("runs/load"), help="of all files (default runs/load)")
    option("--json", type=Path, help="file for the figures")
    option("--keep", action="store_true", help="keep the folder also if nothing was lost")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"--folder {options.folder} exists; remove it, or name another one")
    options.folder.mkdir(parents=True)
    figures = run_load(options, Say())
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    print("\n".join(result_lines(figures)))
    if not figures["problems"] and not options.keep:
        shutil.rmtree(options.folder)
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
