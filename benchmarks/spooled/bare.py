"""llama.cpp through its binding, in a process of its own: what Penstock is measured by."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from spooled.prompts import PROMPTS, SLOTS, THREADS, TOKENS, body

# The same way of waiting as ours, so that only what is done differs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")


def server(model: str, slots: int) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = slots
    params.n_ctx = 1024 * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.verbosity = 0
    params.api_keys = [os.urandom(16).hex()]
    return xllamacpp.Server(params)


def answered(llama: Any, prompt: str) -> tuple[int, str]:
    answer = llama.handle_chat_completions(body(prompt))
    return answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]


def all_of(model: str, slots: int) -> dict[str, Any]:
    """The prompts, as many at once as there are slots."""
    llama = server(model, slots)
    answered(llama, "Hello.")
    wall, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(len(PROMPTS) if slots > 1 else 1) as pool:
        answers = list(pool.map(lambda prompt: answered(llama, prompt), PROMPTS))
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "tokens": sum(count for count, _ in answers),
        "texts": [text for _, text in answers],
    }


def streamed(model: str, at_once: int) -> dict[str, Any]:
    """When the first token comes, and how many come a second, so many at once."""
    llama = server(model, SLOTS)
    answered(llama, "Hello.")

    def one(prompt: str) -> tuple[float, int]:
        begun, first, count = time.perf_counter(), 0.0, 0

        def hear(chunk: Any) -> bool:
            nonlocal first, count
            for choice in chunk.get("choices", ()) if isinstance(chunk, dict) else ():
                if choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter() - begun
                    count += 1
            return False

        llama.handle_chat_completions(body(prompt, stream=True), hear)
        return first, count

    wall, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(at_once) as pool:
        heard = list(pool.map(one, PROMPTS[: max(at_once, 8)]))
    wall = time.perf_counter() - wall
    return {
        "first_ms": median(first for first, _ in heard) * 1e3,
        "rate": sum(count for _, count in heard) / wall,
        "cpu": time.process_time() - cpu,
        "tokens": sum(count for _, count in heard),
        "asked": TOKENS,
    }
