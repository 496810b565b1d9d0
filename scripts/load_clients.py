"""Clients of `load_server.py`: `load_clients.py SETTINGS.json` runs some, each in a thread with a session of its own.

Each client sends a request, waits for its answer, checks it, and sends the next. FOLDER/answers-NAME.jsonl gets a line
before each request and one after its answer, so that what has no answer is known.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import tinker
import torch
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
ROWS, ROW_TOKENS = 8, 24
STATE_EVERY, SAMPLER_EVERY, LIVE_EVERY = 10, 20, 5
"""Steps between two checkpoints, two weights for samplers, and two samples of the trainer itself."""
TOLERANCE = 1e-3
"""Largest difference of a log-prob that is computed again, in a batch of other prompts."""
SAVED = "saved.txt"
"""File with the path of the weights that the trainer saved last."""
END = "end"
"""File after whose creation no more requests are sent."""
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Settings of one process of clients."""

    name: str
    folder: str
    url: str
    key: str
    model: str
    vocabulary_size: int
    kinds: Sequence[str]
    """Kind of each client; a process with a trainer has no others."""
    first: int
    """Number of the first client."""
    steps: int | None = None
    """Number of steps of a trainer that saves no checkpoints and draws no samples; other clients go on until `END`."""
    prompt_tokens: int = 12
    response_tokens: int = 8


class Journal:
    """Lines of requests and answers of all clients of this process."""

    def __init__(self, settings: Settings) -> None:
        self._file = Path(settings.folder, f"answers-{settings.name}.jsonl").open("w", buffering=1)  # noqa: SIM115
        self._lock = threading.Lock()
        self._number = 0

    def request(self, client: int, kind: str, send: Callable[[], T]) -> T:
        """Return the answer of `send`, with a line before it and one after it."""
        with self._lock:
            self._number += 1
            number = f"{client}:{self._number}"
        sent_s = time.time()
        self._write({"request": number, "kind": kind, "sent_s": sent_s})
        answer = send()
        self._write({"request": number, "kind": kind, "sent_s": sent_s, "answered_s": time.time()})
        return answer

    def again(self, kind: str) -> None:
        """Write that a request was lost with its connection and is sent again."""
        self._write({"again": kind})

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(line) + "\n")


class Client:
    """One client: a session, a prompt of its own, and the journal."""

    def __init__(self, settings: Settings, number: int, journal: Journal) -> None:
        self.settings, self.number, self._journal = settings, number, journal
        self.service = tinker.ServiceClient(base_url=settings.url, api_key=settings.key)
        drawn = np.random.RandomState(number).randint(8, settings.vocabulary_size, settings.prompt_tokens)
        self.prompt = types.ModelInput.from_ints(drawn.tolist())

    def request(self, kind: str, send: Callable[[], T]) -> T:
        return self._journal.request(self.number, kind, send)

    def goes_on(self) -> bool:
        return not Path(self.settings.folder, END).exists()

    def draw(self, sampler: tinker.SamplingClient, kind: str) -> None:
        """Ask for two samples of the prompt, and check that they are of it and of the length that was asked for."""
        length = self.settings.response_tokens
        params = types.SamplingParams(max_tokens=length, seed=self.number, stop=[])
        answer = self.request(kind, lambda: sampler.sample(self.prompt, 2, params).result())
        lengths = [(len(one.tokens), len(one.logprobs or ())) for one in answer.sequences]
        assert lengths == [(length, length)] * 2, f"{kind} of client {self.number}: {lengths}"

    # ---- kinds of clients ----

    def sample_base(self) -> None:
        """Sample from the base model."""
        sampler = self.service.create_sampling_client(base_model=self.settings.model)
        while self.goes_on():
            self.draw(sampler, "sample base model")

    def sample_saved(self) -> None:
        """Sample from the weights that the trainer saved last."""
        file, path, sampler = Path(self.settings.folder, SAVED), "", None
        while self.goes_on():
            if file.exists() and (newest := file.read_text()) != path:
                path, sampler = newest, self.service.create_sampling_client(model_path=newest)
            if sampler is None:
                time.sleep(0.5)
            else:
                self.draw(sampler, "sample saved weights")

    def score(self) -> None:
        """Compute log-probs of the prompt under the base model, which are those of the first time."""
        sampler, first = self.service.create_sampling_client(base_model=self.settings.model), None
        while self.goes_on():
            answer = self.request("compute_logprobs", lambda: sampler.compute_logprobs(self.prompt).result())
            found = np.array([value for value in answer if value is not None])
            first = found if first is None else first
            assert len(found) == self.prompt.length - 1
            assert np.abs(found - first).max() < TOLERANCE, f"log-probs of client {self.number} differ"

    def complete(self) -> None:
        """Ask for completions over HTTP, as OpenAI's clients do, and again if the connection or the server ends."""
        body = {
            "model": self.settings.model,
            "prompt": self.prompt.to_ints(),
            "max_tokens": self.settings.response_tokens,
            "seed": self.number,
        }
        with httpx.Client(
            base_url=self.settings.url, headers={"Authorization": f"Bearer {self.settings.key}"}, timeout=600
        ) as http:

            def send() -> dict[str, Any]:
                while True:
                    try:
                        answer = http.post("/v1/completions", json=body)
                        if answer.status_code == 200:
                            return answer.json()
                        assert answer.status_code >= 500, answer.text
                    except httpx.TransportError:
                        pass
                    self._journal.again("completions")
                    time.sleep(1)

            while self.goes_on():
                assert len(self.request("completions", send)["choices"]) == 1

    def train(self) -> None:
        """Train until the end, or for a number of steps; write what was done as FOLDER/trained-NAME.json."""
        model = self.request(
            "create_model",
            lambda: self.service.create_lora_training_client(self.settings.model, rank=0).result(),
        )
        step, alone = 0, self.settings.steps is not None
        while step < self.settings.steps if self.settings.steps is not None else self.goes_on():
            data = rows_of(step, self.settings.vocabulary_size)
            passed = model.forward_backward(data, "importance_sampling")
            stepped = model.optim_step(ADAM)
            self.request("forward_backward", passed.result)
            self.request("optim_step", stepped.result)
            step += 1
            if not alone:
                self._after_step(model, step)
        end = self.request("save_weights_for_sampler", lambda: model.save_weights_for_sampler("end").result())
        report = {"steps": step, "model_id": model.model_id, "path": end.path}
        Path(self.settings.folder, f"trained-{self.settings.name}.json").write_text(json.dumps(report))

    def _after_step(self, model: tinker.TrainingClient, step: int) -> None:
        if step % STATE_EVERY == 0:
            self.request("save_weights", lambda: model.save_state("last", overwrite=True).result())
        if step % SAMPLER_EVERY == 1:
            saved = self.request(
                "save_weights_for_sampler", lambda: model.save_weights_for_sampler(f"step{step}").result()
            )
            part = Path(self.settings.folder, f"{SAVED}.partial")
            part.write_text(saved.path)
            part.replace(Path(self.settings.folder, SAVED))
        if step % LIVE_EVERY == 0:
            self.draw(model.save_weights_and_get_sampling_client().result(), "sample in training")


def rows_of(step: int, vocabulary_size: int) -> list[types.Datum]:
    """Return the rows of a step, which depend on its number alone."""
    generator = np.random.RandomState(step)
    data = []
    for _ in range(ROWS):
        tokens = generator.randint(8, vocabulary_size, ROW_TOKENS + 1)
        columns = {
            "target_tokens": torch.from_numpy(tokens[1:]),
            "logprobs": torch.from_numpy(generator.uniform(-6, -5, ROW_TOKENS).astype(np.float32)),
            "advantages": torch.from_numpy(generator.normal(size=ROW_TOKENS).astype(np.float32)),
        }
        inputs = {name: types.TensorData.from_torch(column) for name, column in columns.items()}
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
        )
    return data


KINDS = {
    "train": Client.train,
    "sample_base": Client.sample_base,
    "sample_saved": Client.sample_saved,
    "score": Client.score,
    "complete": Client.complete,
}


def main(file: str) -> int:
    """Run the clients that a file of settings describes; return 1 if one of them failed."""
    settings = Settings(**json.loads(Path(file).read_text()))
    journal, failures = Journal(settings), list[str]()

    def run(number: int, kind: str) -> None:
        try:
            client = Client(settings, number, journal)
            KINDS[kind](client)
            client.service.close("success").result()
        except BaseException as error:
            failures.append(f"client {number}, {kind}: {type(error).__name__}: {error}")
            raise

    threads = [
        threading.Thread(target=run, args=(settings.first + place, kind), daemon=True)
        for place, kind in enumerate(settings.kinds)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
