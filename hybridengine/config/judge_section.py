"""Section of a generative judge: a frozen model on engines that is asked about responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hybridengine.config.sections import BYTE_UNITS, StructureSection
from hybridengine.config.values import Bytes, Count, GenSizesField, ImportPath, Section, Seed
from hybridengine.topology.sizes import GenSizes


class MessageSection(Section):
    """A chat message to a judge."""

    role: Literal["system", "user", "assistant"]
    """Role of the message."""
    content: str
    """Text, in which {prompt}, {response} and {answer} are replaced."""


class JudgeSection(Section):
    """Generative judge: what it is asked about a response, how it answers, and how its verdict becomes a score."""

    messages: tuple[MessageSection, ...] = ()
    """Chat messages, which pass through the chat template of the judge's tokenizer; exclusive with `text`."""
    text: str = ""
    """Text without a chat template, in which {prompt}, {response} and {answer} are replaced."""
    regex: str = ""
    """Regular expression with one group, the score as a number; its last match in the verdict counts."""
    parser: ImportPath | None = None
    """Function package.module:function in place of `regex`, called as a reward function is, with one verdict at a time in
    place of the responses; a verdict for which it fails has no score."""
    range: tuple[float, float] | None = None
    """Smallest and largest valid score; any number by default."""
    on_unparsed: Literal["drop", "score", "fail"] = "drop"
    """Action for a response without a valid verdict: continue without it, give it `unparsed_score`, or end the run."""
    unparsed_score: float = 0.0
    """Score of a response without a valid verdict, with on_unparsed=score."""
    structure: StructureSection | None = None
    """Form of every verdict."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature; 0 for the most likely tokens."""
    samples: Count = 1
    """Verdicts on each response, whose scores are averaged; those without a valid score are left out."""
    seed: Seed = 0
    """Seed of the draws, in which the number of the row is counted."""
    max_tokens: Count = 256
    """Longest verdict, in tokens."""
    max_prompt_tokens: Count = 4096
    """Longest prompt of the judge, in tokens; a longer one is not sent, and its response has no valid verdict."""
    engine: GenSizesField = GenSizes(1, 1)
    """Sizes p_g-t_g of one engine; the ranks of the reward's pool are divided into engines of p_g·t_g ranks."""
    kv_cache_bytes: Bytes = 256 * BYTE_UNITS["MiB"]
    """Size of the KV cache of one rank; released between calls on ranks that other models share."""
    max_num_seqs: Count = 64
    """Maximum number of verdicts that an engine draws at once."""
    offload: bool = False
    """Keep the weights in host memory between calls, so that training has the memory of the device."""
