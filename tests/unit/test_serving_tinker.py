"""The server as the Tinker SDK sees it: a real client over HTTP, and ranks in memory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from hybridengine.serving.ranks import Passed
from tests.unit.serving_http import KEY
from tests.unit.serving_ranks import VOCABULARY, TableRanks, log_softmax
from tests.unit.serving_tinker import (
    DATA,
    PROMPT,
    ROWS,
    Server,
    no_telemetry,
    post,
    ranks,
    row,
    server,
    training,
    wait_for,
)

__all__ = ["no_telemetry", "ranks", "server"]


def test_a_client_trains_samples_saves_and_loads(server: Server, ranks: TableRanks) -> None:
    with server.client() as client:
        model = training(client)
        assert model.get_info().model_data.model_name == "tiny"
        passed = model.forward_backward(DATA, "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1.0))  # queued behind the pass
        result = passed.result()
        assert result.loss_fn_outputs[0]["logprobs"].to_numpy() == pytest.approx([-np.log(VOCABULARY)] * 3)
        assert result.metrics["loss:sum"] == pytest.approx(2 * np.log(VOCABULARY))
        assert set(stepped.result().metrics or {}) == {"grad_norm:mean"}

        table = np.zeros((VOCABULARY, VOCABULARY))
        table[2], table[3] = -1 / VOCABULARY, -1 / VOCABULARY
        table[2, 3] += 1
        table[3, 4] += 1
        assert ranks.table == pytest.approx(table)

        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=2, temperature=0.0, stop=[4])
        drawn = sampler.sample(
            PROMPT,
            num_samples=2,
            sampling_params=params,
            include_prompt_logprobs=True,
            topk_sample_logprobs=1,
        ).result()
        assert [sequence.tokens for sequence in drawn.sequences] == [[3, 4], [3, 4]]
        assert drawn.sequences[0].stop_reason == "stop"
        assert drawn.sequences[0].logprobs == pytest.approx(
            [log_softmax(table[2])[3], log_softmax(table[3])[4]]
        )
        assert len({sequence.sequence_id for sequence in drawn.sequences}) == 2
        assert drawn.prompt_logprobs is not None
        assert drawn.prompt_logprobs[0] is None
        assert drawn.prompt_logprobs[1] == pytest.approx(-np.log(VOCABULARY))
        assert sampler.compute_logprobs(types.ModelInput.from_ints([2, 3])).result()[1] == pytest.approx(
            log_softmax(table[2])[3]
        )

        saved = model.save_state("first").result().path
        assert saved == f"tinker://{model.model_id}/weights/first"
        model.forward_backward(DATA, "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1.0)).result()
        assert ranks.table != pytest.approx(table)

    with server.client() as client:
        rest = tinker.RestClient(base_url=server.url, api_key=KEY)
        (listed,) = rest.list_checkpoints(model.model_id).result().checkpoints
        assert (listed.tinker_path, listed.checkpoint_type) == (saved, "training")
        again = client.create_training_client_from_state_with_optimizer(saved).result()
        assert ranks.table == pytest.approx(table)
        assert again.forward(DATA, "cross_entropy").result().metrics["loss:sum"] < 2 * np.log(VOCABULARY)
        assert ranks.calls[-2:] == ["load optimizer=True", "forward"]
        own = [again.save_state(name).result().path for name in ("a", "b")]
        rest.delete_checkpoint_from_tinker_path(own[1]).result()  # where a restart would resume the model
        assert [
            each.tinker_path for each in rest.list_checkpoints(again.model_id).result().checkpoints
        ] == own[:1]
        with pytest.raises(tinker.BadRequestError, match="/b' does not exist or has expired"):
            rest.delete_checkpoint_from_tinker_path(own[1]).result()


def test_a_custom_loss_and_parts_that_arrive_first_last(server: Server, ranks: TableRanks) -> None:
    with server.client() as client:
        client.holder._client_config = client.holder._client_config.model_copy(
            update={"fwdbwd_max_chunk_len": 1, "proto_compress_fwdbwd": True}
        )
        model = training(client)
        data = [row([number], [number + 1], [1.0]) for number in range(5)]
        losses = model.forward_backward(data, "cross_entropy").result()
        assert len(losses.loss_fn_outputs) == 5
        assert losses.metrics["loss:sum"] == pytest.approx(5 * np.log(VOCABULARY))
        assert ranks.calls.count("forward_backward") == 5
        model.optim_step(types.AdamParams(learning_rate=0.0)).result()

        def squares(_: object, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            return torch.cat(log_probs).square().sum(), {"own:sum": 1.0}

        custom = model.forward_backward_custom(data, squares).result()
        assert custom.metrics["loss:sum"] == pytest.approx(5 * np.log(VOCABULARY) ** 2)
        # dC/dlogp = 2 logp, and dlogp/dlogit of the target is 1 - 1/V
        assert ranks.gradient[0, 1] == pytest.approx(-2 * np.log(VOCABULARY) * (1 - 1 / VOCABULARY))


def test_a_skipped_step_and_a_loss_that_is_not_finite_arrive(
    server: Server, ranks: TableRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = {"grad_norm:mean": math.nan, "skipped:sum": 1.0}
    passed = Passed([{"logprobs": np.zeros(3)}], {"loss:sum": math.nan})
    monkeypatch.setattr(ranks, "optim_step", lambda _: skipped)
    monkeypatch.setattr(ranks, "forward_backward", lambda *_: passed)
    with server.client() as client:
        model = training(client)
        assert math.isnan(model.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
        stepped = model.optim_step(types.AdamParams(learning_rate=1.0)).result()
        assert stepped.metrics == {"skipped:sum": 1.0}


def test_samples_that_wait_together_are_one_call(server: Server, ranks: TableRanks) -> None:
    with server.client() as client:
        model = training(client)
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4)
        ranks.free.clear()
        passed = model.forward(DATA, "cross_entropy")
        wait_for(lambda: "forward" in ranks.asked)
        futures = [sampler.sample(PROMPT, num_samples=1, sampling_params=params) for _ in range(32)]
        wait_for(lambda: len(server.store.queued()) == 33)
        ranks.free.set()
        drawn = {tuple(future.result().sequences[0].tokens) for future in futures}
        assert len(drawn) > 1  # seeds differ
        assert passed.result().metrics
        assert ranks.calls == ["begin_model", "forward", "sample 32 live"]


def test_a_sampler_is_frozen(server: Server, ranks: TableRanks) -> None:
    params = types.SamplingParams(max_tokens=1, temperature=0.0)
    with server.client() as client:
        model = training(client)
        model.forward_backward(DATA, "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1.0)).result()
        frozen = model.save_weights_and_get_sampling_client().result()
        named = model.save_weights_for_sampler("kept").result().path
        model.forward_backward([row([2], [7], [9.0])], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1.0)).result()

        with pytest.raises(
            tinker.RequestFailedError,
            match=r"weights of step 1, which are no longer kept: the model is at step 2",
        ) as caught:
            frozen.sample(PROMPT, 1, params).result()
        assert caught.value.category == "user"
        newest = model.save_weights_and_get_sampling_client().result()
        assert newest.sample(PROMPT, 1, params).result().sequences[0].tokens == [7]
        kept = client.create_sampling_client(model_path=named).result()
        assert kept.sample(PROMPT, 1, params).result().sequences[0].tokens == [3]
        assert ranks.calls[-1].startswith("sample 1 kept")
        base = client.create_sampling_client(base_model="tiny").result()
        assert base.sample(PROMPT, 1, params).result().sequences[0].tokens == [0]
        assert ranks.calls[-1] == "sample 1 base"


def test_a_client_survives_a_restart_of_the_server(tmp_path: Path, ranks: TableRanks) -> None:
    first = Server(tmp_path, ranks)
    client = tinker.ServiceClient(base_url=first.url, api_key=KEY)
    model = training(client)
    adam = types.AdamParams(learning_rate=1.0)
    for _ in range(2):
        model.forward_backward(DATA, "cross_entropy").result()
        model.optim_step(adam).result()
        saved = model.save_state(f"step-{len(ranks.calls)}").result().path
    model.forward_backward(DATA, "cross_entropy").result()
    first.stop()

    fresh = TableRanks()
    second = Server(tmp_path, fresh, port=first.port)
    model.optim_step(adam).result()
    assert fresh.calls == ["load optimizer=True", "forward_backward", "optim_step"]
    expected = TableRanks()
    for _ in range(3):
        expected.forward_backward([*ROWS], "cross_entropy", {}, True)
        expected.optim_step(adam)
    assert fresh.table == pytest.approx(expected.table)
    assert post(second, "weights_info", {"tinker_path": saved}) == {"base_model": "tiny", "is_lora": False}
    client.close("success").result()
    second.stop()
