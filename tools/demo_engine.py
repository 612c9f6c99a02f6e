# SPDX-License-Identifier: Apache-2.0
"""One offline engine of the demo, in a process of its own.

    python demo_engine.py TASK RESULT

TASK is JSON with ``engine``, the arguments of ``LLM``, and ``prompts``. RESULT is
written as JSON: ``kv_cache_tokens``, and ``requests`` with each prompt's
``token_ids`` and, where the engine extracts, ``kv_transfer_params``.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from vllm import LLM, SamplingParams

    llm = LLM(**task["engine"])
    cache = llm.llm_engine.vllm_config.cache_config
    assert cache.num_gpu_blocks is not None  # known once the engine has started
    outputs = llm.generate(
        task["prompts"], SamplingParams(max_tokens=1), use_tqdm=False
    )
    result = {
        "kv_cache_tokens": cache.num_gpu_blocks * cache.block_size,
        "requests": [
            {
                "token_ids": output.prompt_token_ids,
                "kv_transfer_params": output.kv_transfer_params,
            }
            for output in outputs
        ],
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
