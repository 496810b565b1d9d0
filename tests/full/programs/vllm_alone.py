"""Load a folder with plain vLLM in a process of its own, and answer greedily.

python -m tests.full.programs.vllm_alone FOLDER PROMPTS NUM_TOKENS      (PROMPTS: lists of token ids as JSON)
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from hybridengine.backends.vllm import environment


def main() -> None:
    folder, prompts, num_tokens = sys.argv[1:]
    os.environ |= {**environment.ON_CPU, "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams  # after the environment is set, which the import reads

    engine = LLM(model=folder, dtype="float32", max_model_len=128, enforce_eager=True, disable_log_stats=True)
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    answers = engine.generate(
        asked, SamplingParams(temperature=0.0, max_tokens=int(num_tokens)), use_tqdm=False
    )
    print("\n" + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
