"""vLLM on the prompts of benchmarks/gpu.py, where it is installed."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process is its faster way here
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
MOST_SEQUENCES = 1024


def rollouts(
    model: Path | dict[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    group: int,
    tokens: int,
    dtype: str,
    memory: float,
    repeats: int,
    budget: float,
    now: Callable[[], float],
) -> Iterator[dict[str, Any]]:
    """With log-probabilities and without. A config.json instead of a folder: random weights.

    Behind `budget` seconds a pass is not repeated once more.
    """
    os.environ |= ENVIRONMENT
    try:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    except ImportError as error:
        yield {"skipped": f"vLLM can't be imported: {error}"}
        return
    sequences = min(MOST_SEQUENCES, len(prompts) * group)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        settings: dict[str, Any] = {"model": str(model)}
        if isinstance(model, dict):
            Path(scratch, "config.json").write_text(json.dumps(model))
            settings = {"model": scratch, "load_format": "dummy", "skip_tokenizer_init": True}
        llm = LLM(
            **settings,
            dtype=dtype,
            gpu_memory_utilization=memory,
            max_model_len=max(map(len, prompts)) + tokens,
            max_num_seqs=sequences,
            compilation_config={"max_cudagraph_capture_size": sequences},
        )
    started = time.perf_counter() - start
    print(f"vLLM is there after {started:.0f} s", file=sys.stderr, flush=True)
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    for logprobs in (0, None):
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            n=group,
            ignore_eos=True,
            logprobs=logprobs,
            detokenize=False,
        )
        seconds, written = [], 0
        for done in range(repeats + 1):
            if done > 1 and time.perf_counter() - start > budget:
                break
            begun = now()
            answers = llm.generate(asked, sampling, use_tqdm=False)
            seconds.append(now() - begun)
            print(f"{seconds[-1]:.2f} s a pass", file=sys.stderr, flush=True)
            written = sum(len(c.token_ids) for answer in answers for c in answer.outputs)
        yield {
            "log_probabilities": logprobs is not None,
            "start_seconds": started,
            "first_seconds": seconds[0],
            "seconds": seconds[1:],
            "tokens_per_second": written / min(seconds[1:]),
        }
