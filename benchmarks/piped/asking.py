"""What every side is asked: the same models, the same prompts, the same answers in the same order;
and `transformers.generate` in one process, which is the limit for one job."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from processes import process_seconds

_BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
SIZES: dict[str, dict[str, int]] = {
    # Compute nearly nil: what is left is what lies between the nodes.
    "plumbing": {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    # The layers of a model of 1.1 billion weights, but only some of its 22.
    "billion": {"num_hidden_layers": 8, **_BILLION},
    "whole_billion": {"num_hidden_layers": 22, **_BILLION},
}
LAYERS = {"real": 30, **{name: size["num_hidden_layers"] for name, size in SIZES.items()}}
PROMPT = 38
"""Tokens of a prompt, where a rate is measured."""
_STORY = (
    "The ferry left the harbour at seven, with forty passengers and a crate of oranges for the"
    " lighthouse. Halfway across the bay the engine stopped. The captain, who had seen worse, sent"
    " the youngest sailor down with a lantern and a wrench. Twenty minutes later the ferry moved"
    " again, slowly, and the passengers shared the oranges."
)
_CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance
"""
TEXTS = {
    "quoting": (
        f"Text:\n{_STORY}\n\nThe same text again, word for word:\n",
        f"```python\n{_CODE}```\n\nThe same class with a method withdraw:\n\n```python\n",
    ),
    "new": (
        "A short story about a clockmaker who finds a door behind the largest clock:\n\n",
        "Dear Anna, thank you for your letter. You ask what I remember of that summer:",
    ),
}
"""By whether the answer repeats what is in the prompt."""


def make_model(name: str, gguf: Path, folder: Path) -> None:
    """A folder with safetensors in float32, as each side reads it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from penstock.workloads.pipes.weights.source import open_source

    source = open_source(gguf)
    tokenizer = source.tokenizer()
    torch.manual_seed(1)
    if name == "real":
        model = LlamaForCausalLM(LlamaConfig(**source.config)).float()
        tensors = dict(source.ends())  # by the names of transformers; the head is the embedding
        for layer in range(source.config["num_hidden_layers"]):
            for tensor, value in source.layer(layer).items():
                tensors[f"model.layers.{layer}.{tensor}"] = value
        model.load_state_dict(tensors, strict=False)
    else:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            **SIZES[name],
        )
        model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Asked:
    """A side that answers, and the processes that work for it."""

    sent = 0
    """Bytes of steps that have left its first node, before they are encrypted."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids

    def read(self) -> tuple[float, float]:
        """Wall and processor seconds of all its processes together."""
        return time.perf_counter(), sum(map(process_seconds, self._pids))

    def prompt(self, length: int, number: int = 0) -> Any:
        """Tokens of no meaning, the same for each side; none is special."""
        return [100 + (number * 7919 + position * 31) % 40_000 for position in range(length)]

    async def answer(self, prompt: Any, count: int) -> None:
        """Return at the end of an answer of so many tokens."""
        raise NotImplementedError


async def measured(asked: Asked, plan: dict[str, Any]) -> dict[str, float]:
    """Rates, times to the first token, and tokens/s of several jobs; the best of each.

    What a token takes is what lies between the best answer of one token and the best of all of
    them: a slow first one does not make the rest look quick.
    """

    async def timed(*prompts: Any, count: int) -> tuple[float, float]:
        wall, cpu = asked.read()
        await asyncio.gather(*(asked.answer(prompt, count) for prompt in prompts))
        ended, spent = asked.read()
        return ended - wall, spent - cpu

    def best(spans: list[tuple[float, float]]) -> tuple[float, float]:
        return min(wall for wall, _ in spans), min(cpu for _, cpu in spans)

    turns, steps, found = range(plan["turns"]), plan["tokens"] - 1, dict[str, float]()
    firsts, wholes, prompt = [], [], asked.prompt(PROMPT)
    for _ in turns:
        before = asked.sent
        firsts.append(await timed(prompt, count=1))
        prefill = asked.sent - before
        wholes.append(await timed(prompt, count=plan["tokens"]))
        found["bytes"] = (asked.sent - before - 2 * prefill) / steps
    wall, cpu = (whole - first for whole, first in zip(best(wholes), best(firsts), strict=True))
    found |= {"rate": steps / max(wall, 1e-9), "cpu_ms": cpu / steps * 1000}
    for length in plan["first"]:
        prompt = asked.prompt(length, 1)
        wall, cpu = best([await timed(prompt, count=1) for _ in turns])
        found |= {f"first_{length}_ms": wall * 1000, f"first_{length}_cpu_ms": cpu * 1000}
    for count in plan["at_once"]:
        prompts = [asked.prompt(PROMPT, 2 + number) for number in range(count)]
        wall, _ = best([await timed(*prompts, count=plan["together"]) for _ in turns])
        found[f"together_{count}"] = count * plan["together"] / wall
    return found


class Generate(Asked):
    """`transformers.generate` in this process, on one thread."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def read(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    async def answer(self, prompt: list[int], count: int) -> None:
        told = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            made = self._model.generate(
                told,
                attention_mask=self._torch.ones_like(told),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        assert made.shape[1] == len(prompt) + count


async def generate(folder: Path, plan: dict[str, Any]) -> dict[str, float]:
    asked = Generate(folder)
    await asked.answer(asked.prompt(8), 2)
    return await measured(asked, {**plan, "at_once": ()})
