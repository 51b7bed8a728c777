"""Real weights through segments: what transformers makes of the same weights, to the token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.models import smollm2
from tests.support.pipes.random_models import RandomSource, generated
from tests.support.pipes.walking import Split

from penstock.workloads.pipes.weights.source import open_source

PROMPTS = [
    [504, 3575, 282, 4649, 314],
    [1, 4093, 198, 1195, 314, 260, 2240, 282, 253, 3050, 47, 2, 198, 1, 520, 9531, 198],
    [(7919 * n) % 40_000 + 100 for n in range(70)],
]
NEW = 10


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    source = open_source(smollm2())
    config = transformers.AutoConfig.for_model(**source.config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = dict(source.ends())
    for n in range(config.num_hidden_layers):
        state |= {f"model.layers.{n}.{name}": one for name, one in source.layer(n).items()}
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # it is in no file
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return [generated(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("cuts", [(), (1, 11, 12, 25)])
def test_real_weights_give_the_tokens_of_transformers(
    model: Any, expected: list[list[int]], cuts: tuple[int, ...]
) -> None:
    split = Split(RandomSource(model), cuts)
    assert [split.greedy(prompt, NEW) for prompt in PROMPTS] == expected
    assert split.greedy(PROMPTS[2], NEW, chunk=32) == expected[2]
    jobs = [split.job() for _ in PROMPTS]
    ids, sent = [list(prompt) for prompt in PROMPTS], [0] * len(jobs)
    for _ in range(NEW):
        parts = [(job, ids[n][sent[n] :], sent[n]) for n, job in enumerate(jobs)]
        for n, logits in enumerate(split.step(*parts)):
            sent[n] = len(ids[n])
            ids[n].append(int(logits[-1].argmax()))
    assert [tokens[-NEW:] for tokens in ids] == expected


CHILD = """
import json
from pathlib import Path
import torch
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import Job
from penstock.workloads.pipes.llm_model import LlmModel
from penstock.workloads.pipes.model.architecture import Architecture
from penstock.workloads.pipes.model.cache import KvPool
from penstock.workloads.pipes.weights.memory import give_back

torch.set_num_threads(1)
config = dict(model_type="llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
              num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=8192)

class Made:
    path, config = "made", config
    def layer(self, n):
        shapes = {"self_attn.q_proj": (512, 512), "self_attn.k_proj": (256, 512),
                  "self_attn.v_proj": (256, 512), "self_attn.o_proj": (512, 512),
                  "mlp.gate_proj": (1536, 512), "mlp.up_proj": (1536, 512),
                  "mlp.down_proj": (512, 1536), "input_layernorm": (512,),
                  "post_attention_layernorm": (512,)}
        return {f"{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}

def resident():
    give_back()  # the row that was computed is none of it
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))

def pass_of(model, pool, tokens):
    cache = pool.reserve(range(model.layers.end), 8192)
    job = Job(bytes(16), "pipe", "model", "origin", cache=cache)
    job.count, job.data = tokens, torch.randn(tokens, 512)
    model.process_job(job)
    return job

kind = Architecture(config)
first = LlmModel.load(kind, Made(), LayerRange(0, 1), "float32")
layouts = {n: first.layouts[0] for n in range(12)}
pool = KvPool(layouts, 8192, 1 << 31, torch.float32)
pass_of(first, pool, 512).cache.free()  # code and buffers that computing needs are there now
found = {"before": resident()}
model = LlmModel.load(kind, Made(), LayerRange(0, 12), "float32")
found["loaded"], found["weights"] = resident(), model.weight_bytes
pass_of(model, pool, 512).cache.free()
found["warm"] = resident()
job = pass_of(model, pool, 512)
found["filled"], found["promised"] = resident(), job.cache.bytes
job.cache.free()
found["freed"] = resident()
print(json.dumps(found))
"""


def test_weights_are_held_once_and_a_cache_takes_memory_as_tokens_come() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=Path(__file__).parents[4],
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loaded"] - found["before"] <= 1.1 * found["weights"]
    taken = found["filled"] - found["warm"]
    # 512 of 8192 tokens are a sixteenth.
    assert found["promised"] / 20 <= taken <= found["promised"] / 10, found
    assert found["freed"] - found["warm"] <= taken / 4, found
