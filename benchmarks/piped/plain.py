"""transformers.generate in one process: the limit for one job, and nothing between."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from piped.models import prompt
from piped.plan import PLANS, Plan, Spans
from transformers import AutoModelForCausalLM


def measure(folder: Path, dtype: str, how: str) -> dict[str, Any]:
    plan = PLANS[how]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    generate(model, prompt(8), 2)
    return measured(model, plan)


def generate(model: Any, ids: list[int], count: int) -> tuple[float, float, list[int]]:
    """Wall and processor seconds, and what came."""
    told = torch.tensor([ids])
    began, spent = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        made = model.generate(
            told,
            attention_mask=torch.ones_like(told),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return (
        time.perf_counter() - began,
        time.process_time() - spent,
        [int(token) for token in made[0, len(ids) :]],
    )


def measured(model: Any, plan: Plan) -> dict[str, Any]:
    ids = prompt(plan.prompt)
    spans, made = Spans(), list[int]()
    for _ in range(plan.turns):
        first, first_cpu, _ = generate(model, ids, 1)
        whole, whole_cpu, made = generate(model, ids, plan.tokens)
        spans.add((first, first_cpu), (whole, whole_cpu))
    found: dict[str, Any] = {**spans.figures(plan.tokens), "text": made}
    for length in plan.first:
        firsts = [generate(model, prompt(length, 1), 1) for _ in range(plan.turns)]
        found[f"first_{length}_ms"] = min(one[0] for one in firsts) * 1000
        found[f"first_{length}_cpu_ms"] = min(one[1] for one in firsts) * 1000
    return found
