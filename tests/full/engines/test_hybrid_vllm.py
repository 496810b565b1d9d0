"""Real Megatron-core and real vLLM in the same processes, on one copy of the weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridengine.backends.engine import Response
from hybridengine.families.registry import FAMILIES
from hybridengine.topology.grid import RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.full.engines.hybrid_rounds import (
    KV_CACHE_BYTES,
    NEW_TOKENS,
    TEMPERATURE,
    Outcome,
    Round,
    live_through_rounds,
    measure_memory,
    prompts_of,
)
from tests.gloo.adapters_by_hand import Adapted, adapt, write_peft
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import YARN as LATENT_YARN
from tests.gloo.tiny_models import write_model

TOLERANCE = 1e-4
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Case:
    """A model and its two layouts."""

    family: str
    tied: bool
    train: str
    gen: str
    order: RankOrder = RankOrder.PAPER
    features: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the model's configuration."""
    adapted: bool = False
    """True if adapters are trained, which the engine has as vLLM's own."""

    @property
    def num_ranks(self) -> int:
        return TrainSizes.parse(self.train).num_ranks

    @property
    def keeps_shards(self) -> bool:
        """True if ranks generate with the shards that they train."""
        train, gen = TrainSizes.parse(self.train), GenSizes.parse(self.gen)
        fields = ("pp_size", "tp_size", "expert_parts", "expert_shards")
        return all(getattr(train, field) == getattr(gen, field) for field in fields)

    def __str__(self) -> str:
        name = f"{self.family}-{'tied' if self.tied else 'untied'}-{self.train}-to-{self.gen}{'-adapted' * self.adapted}"
        rotary = self.features.get("rope_parameters")
        return f"{name}-{rotary['rope_type']}" if rotary else name


WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
CASES = [
    Case("qwen3", True, "2-2-1", "1-1", features={"rope_parameters": YARN}),
    Case("phi3", False, "1-2-1", "1-1"),
    Case("mistral", True, "2-1-1", "1-1", features={"sliding_window": 20}),
    Case("gemma3_text", False, "1-2-1", "1-1", features={"sliding_window": 20}),
    Case("glm4", False, "2-2-1", "1-1"),
    Case("granite", True, "2-1-2", "1-1"),
    Case(
        "llama", False, "2-1-2", "2-1", RankOrder.MEGATRON, {"rope_parameters": LINEAR}
    ),  # pipelines [0, 2] and [1, 3]
    Case("qwen2", True, "1-4-1", "1-2", features=WINDOW),
    Case("llama", True, "2-1-1 c=2 v=2", "1-1"),
    Case("qwen3_moe", False, "1-2-1 e=2 etp=1", "1-2 e=2"),
    Case("mixtral", False, "1-1-2 e=2", "1-1"),
    Case("deepseek_v3", False, "2-2-1 e=2 etp=1", "1-2 e=2"),
    Case(
        "deepseek_v3",
        False,
        "1-1-2 e=2",
        "1-1",
        features={"rope_parameters": {"rope_theta": 1e4, **LATENT_YARN}},
    ),
    Case("qwen3_moe", False, "2-1-1", "2-1"),
    Case("mixtral", True, "2-1-1", "2-1"),
    Case("gemma3_text", False, "2-1-1", "2-1", features={"sliding_window": 20}),
    Case("qwen3", True, "2-2-1", "1-1", adapted=True),
    Case("llama", False, "1-4-1", "1-2", adapted=True),
    Case("phi3", False, "1-2-1", "1-2", adapted=True),
    Case("gemma3_text", False, "1-2-1", "1-1", features={"sliding_window": 20}, adapted=True),
    Case("glm4", True, "1-2-1", "1-2", features={"attention_bias": False}, adapted=True),
    Case("granite", False, "1-2-1", "1-1", adapted=True),
    Case("qwen3_moe", False, "1-2-1 e=2 etp=1", "1-2 e=2", adapted=True),
    Case("deepseek_v3", False, "1-2-1 e=2 etp=1", "1-2 e=2", adapted=True),
]
"""One for each family, with gathers over both axes, one of them, and none; context ranks with virtual stages; and
adapters of families with one and with three tensors for q, k and v, with one for gate and up, with norms of outputs, and
of experts, also beside latent attention."""


@dataclass(frozen=True)
class Lived:
    """A case, the observations of its ranks, and transformers' models before and after training."""

    case: Case
    ranks: list[Outcome]
    before: PreTrainedModel
    after: PreTrainedModel

    @property
    def kept_bytes(self) -> int:
        """Bytes of a rank that the engine's own do not replace: adapters that it has merged, and what they adapt."""
        if not (self.case.adapted and self.case.train.endswith("e=2 etp=1")):
            return 0
        # t = 2 cuts rows of B, or columns of A, in two, but not projections to latent vectors; e = 2 halves the experts.
        experts = [one for name, one in self.after.named_parameters() if ".experts.parametrizations." in name]
        count, factors_a = sum(one.numel() // 2 for one in experts), dict[int, int]()
        for name, layer in self.after.named_modules():
            if isinstance(layer, Adapted):
                by_rows, whole = (
                    name.endswith(("o_proj", "down_proj")),
                    name.endswith(("_a_proj", "_with_mqa")),
                )
                count += layer.layer.weight.numel() // (1 if whole else 2)
                count += layer.lora_b.numel() // (1 if by_rows or whole else 2)
                factors_a[id(layer.lora_a)] = layer.lora_a.numel() // (2 if by_rows else 1)
        # Megatron-core's bucket of each trained parameter is a multiple of 128 numbers; all others are anyway.
        return 4 * (count + sum(-(-size // 128) * 128 for size in factors_a.values()))

    def rounds(self, number: int) -> list[tuple[int, Round]]:
        """Return (replica, round) of every rank."""
        return [(outcome.replica, outcome.rounds[number]) for outcome in self.ranks]


@pytest.fixture(scope="module", params=CASES, ids=str)
def lived(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks: RankLauncher
) -> Lived:
    """Return all ranks' outcomes of a case; the ranks are started once for all tests of the case."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp(str(case))
    # vLLM on a CPU requires a head_dim that is a multiple of 32; for some families it is hidden_size / num_heads.
    hidden_size = 256 if case.family in ("qwen2", "phi3") else 64
    sizes: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 256, "hidden_size": hidden_size}
    sizes |= case.features
    if TrainSizes.parse(case.train).virtual_stages > 1:
        sizes["num_hidden_layers"] = 4
    before = write_model(folder / "model", case.family, case.tied, **sizes)
    if case.adapted:
        write_peft(folder / "adapters", adapt(before))
    ranks = run_ranks(
        case.num_ranks,
        live_through_rounds,
        folder / "model",
        (case.train, case.gen, case.order),
        folder / "trained",
        folder / "adapters" if case.adapted else None,
        timeout_s=240,
    )
    whole = "model" if case.adapted else "trained"
    after = AutoModelForCausalLM.from_pretrained(folder / whole, dtype=torch.float32)
    if case.adapted:
        adapt(after, load_file(folder / "trained" / "adapter_model.safetensors"))
    return Lived(case, ranks, before, after)


def test_every_family_has_a_case():
    # Models that read images: test_images.py.
    assert {case.family for case in CASES} == {name for name, one in FAMILIES.items() if not one.has_vision}


def test_vllm_has_the_parameters_of_its_layout(lived: Lived):
    for outcome in lived.ranks:
        assert outcome.vllm_parameters == outcome.layout_parameters


def test_building_an_engine_leaves_the_process_as_it_was(lived: Lived):
    for outcome in lived.ranks:
        assert outcome.generators_kept == {"torch": True, "python": True, "numpy": True}
        assert outcome.num_threads == 2
        assert not outcome.shared_memory


def test_generating_while_training_is_an_error(lived: Lived):
    for outcome in lived.ranks:
        assert "switch to generation first" in outcome.error_while_training


@pytest.mark.parametrize("number", [0, 1, 2])
def test_greedy_tokens_are_those_of_transformers(lived: Lived, number: int):
    model = lived.after if number == 2 else lived.before
    for replica, seen in lived.rounds(number):
        for prompt, generated in zip(prompts_of(replica), seen.greedy, strict=True):
            assert len(generated.token_ids) == NEW_TOKENS
            assert generated.token_ids == expected_logits(model, prompt, generated).argmax(-1).tolist()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_log_probs_of_both_backends_are_those_of_transformers(lived: Lived, number: int):
    model = lived.after if number == 2 else lived.before
    by_replica = {replica: seen.sampled for replica, seen in lived.rounds(number)}
    expected = {
        replica: [
            token_log_probs(model, prompt, generated)
            for prompt, generated in zip(prompts_of(replica), sampled, strict=True)
        ]
        for replica, sampled in by_replica.items()
    }
    compared = 0
    for replica, seen in lived.rounds(number):
        for generated, log_probs in zip(seen.sampled, expected[replica], strict=True):
            torch.testing.assert_close(
                torch.tensor(generated.log_probs), log_probs, rtol=TOLERANCE, atol=TOLERANCE
            )
        for replica_log_probs, (other, _) in zip(
            seen.megatron_log_probs, sorted(by_replica.items()), strict=False
        ):
            for found, log_probs in zip(replica_log_probs, expected[other], strict=True):
                torch.testing.assert_close(torch.tensor(found), log_probs, rtol=TOLERANCE, atol=TOLERANCE)
                compared += 1
    stages = int(lived.case.train[0])
    assert compared == lived.case.num_ranks // stages * len(by_replica) * len(prompts_of(0))


@pytest.mark.parametrize("number", [0, 1])
def test_samples_follow_their_seeds_on_all_ranks_of_an_engine(lived: Lived, number: int):
    first_of: dict[int, Round] = {}
    for replica, seen in lived.rounds(number):
        first = first_of.setdefault(replica, seen)
        assert token_ids(seen.sampled) == token_ids(first.sampled)
        assert token_ids(seen.sampled_otherwise) == token_ids(first.sampled_otherwise)
        assert token_ids(seen.sampled_again) == token_ids(seen.sampled)
        assert all(
            one != other
            for one, other in zip(token_ids(seen.sampled), token_ids(seen.sampled_otherwise), strict=True)
        )


def test_a_second_round_repeats_the_first(lived: Lived):
    for (_, first), (_, second) in zip(lived.rounds(0), lived.rounds(1), strict=True):
        assert token_ids(second.greedy) == token_ids(first.greedy)
        assert second.sampled == first.sampled


def test_tokens_follow_the_trained_weights_although_prefixes_are_cached(lived: Lived):
    outcome = lived.ranks[0]
    # vLLM on a CPU has no prefix cache for latent attention.
    assert outcome.caches_prefixes == (lived.case.family != "deepseek_v3")
    assert outcome.block_tokens < max(map(len, prompts_of(0)))  # so that a stale cache would be used
    for (_, old), (_, new) in zip(lived.rounds(1), lived.rounds(2), strict=True):
        changed = [a != b for a, b in zip(token_ids(old.greedy), token_ids(new.greedy), strict=True)]
        assert any(changed)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_switch_costs_what_the_layouts_say(lived: Lived, number: int):
    """Weights come back bitwise, nothing is held twice, and the KV cache exists only during generation."""
    for _, seen in lived.rounds(number):
        assert seen.is_unchanged
        assert (seen.to_generate.redundant_bytes, seen.to_train.redundant_bytes) == (lived.kept_bytes, 0)
        assert seen.to_train.received_bytes == 0
        assert (seen.to_generate.received_bytes == 0) == lived.case.keeps_shards
        at_work, at_rest = seen.kv_cache_bytes
        assert 0.8 * KV_CACHE_BYTES <= at_work <= KV_CACHE_BYTES
        assert at_rest == 0
        before, generating, after = seen.resident_bytes
        assert generating - before > at_work - 8 * MEBIBYTE
        if number:  # the first round also loads code and allocates buffers of the first requests
            assert abs(after - before) < 16 * MEBIBYTE


def test_memory_goes_back_to_the_system(tmp_path: Path, run_ranks: RankLauncher):
    """Resident sets with 227 MB of weights: a quarter and its gradients in training, all of them in generation."""
    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "head_dim": 96,
    }
    write_model(tmp_path / "model", "llama", **sizes)
    for seen in run_ranks(4, measure_memory, tmp_path / "model", "2-2-1", "1-1"):
        trained = seen.training_bytes + seen.gradient_bytes
        assert trained < 0.6 * seen.generating_bytes
        for training, generating in zip(seen.resident_training, seen.resident_generating, strict=True):
            grown = generating - training
            assert grown == pytest.approx(
                seen.generating_bytes + seen.cache_bytes - trained, abs=24 * MEBIBYTE
            )
        assert max(seen.resident_training) - min(seen.resident_training) < 16 * MEBIBYTE


def expected_logits(model: PreTrainedModel, prompt: list[int], generated: Response) -> torch.Tensor:
    """Return the logits from which each generated token was drawn, [tokens, V] float64."""
    return logits_of(model, tuple(prompt + generated.token_ids))[len(prompt) - 1 : -1].double()


@functools.lru_cache(maxsize=256)  # the ranks of an engine have the same sequences
def logits_of(model: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def token_log_probs(model: PreTrainedModel, prompt: list[int], generated: Response) -> torch.Tensor:
    """Return the log-probability of each generated token under its sampling distribution, [tokens] float32."""
    log_probs = (expected_logits(model, prompt, generated) / TEMPERATURE).log_softmax(-1)
    return log_probs.gather(1, torch.tensor(generated.token_ids).unsqueeze(1)).squeeze(1).float()


def token_ids(outputs: list[Response]) -> list[list[int]]:
    return [output.token_ids for output in outputs]
