"""The spool and the OpenAI API beside llama.cpp itself, on one machine in one run.

`python benchmarks/spool.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from harness import MODEL, Benchmark, Experiment, Figures, Run, Server, call, serving, versions
from processes import cpu_seconds, percentile
from report import Goal, Results, by_figure, judged, look_up
from report import page as paged

import penstock
from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import ServerConfig, SpoolOptions, Sync
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.pool import EventKind, JobEvent

SPOOL, API, LLAMA, SEQUENTIAL, CONTEXTS, LOOP = (
    "penstock",
    "api",
    "llama",
    "one",
    "contexts",
    "loop",
)
TOKENS, SLOTS, THREADS = 16, 8, os.cpu_count() or 1
TITLES = {
    CONTEXTS: "a context for each job, 2 workers of 4 threads",
    SEQUENTIAL: "llama.cpp, one after another",
    LLAMA: f"llama.cpp's server, {SLOTS} slots",
    SPOOL: "Penstock's spool",
    API: "Penstock's OpenAI API",
    LOOP: "the bare loop",
}
SIZES: dict[str, tuple[Any, Any, Any]] = {
    # Of a whole, a quick and a tiny run; a tiny one only shows that it runs.
    "prompts": (32, 32, 3),
    "at_once": ((1, 8, 32), (1, 8, 32), (2,)),
    "queued": (1000, 300, 50),
    "seconds": (3.0, 3.0, 0.3),
    "started": (200, 200, 20),
}
THINGS = [
    *("river", "stone", "cloud", "bread", "clock", "train", "garden", "bridge"),
    *("winter", "music", "letter", "market", "island", "candle", "window", "forest"),
    *("mirror", "ladder", "hammer", "pillow", "basket", "anchor", "feather", "lantern"),
    *("compass", "saddle", "violin", "kettle", "ribbon", "button", "carpet", "tunnel"),
]
PROMPTS = [f"Tell me one short fact about a {thing}, please." for thing in THINGS]
"""What every side is asked: the same short questions, greedily answered."""
NONE = "none"
"""A model that computes nothing."""


def experiments(run: Run) -> Iterator[Experiment]:
    if not run.options.model.exists():
        raise SystemExit(f"there is no model at {run.options.model}: 'make model' fetches it")
    run.facts["engine"] = ", ".join(versions("xllamacpp", "openai", "cyllama"))
    plan, model = run.plan(SIZES), str(run.options.model.resolve())
    prompts, reference = PROMPTS[: plan.prompts], list[str]()

    def answers(ask: Callable[[Path], Figures]) -> Callable[[Path], Figures]:
        """The same prompts by each side; the first side's texts are what others are held to."""

        def measure(folder: Path) -> Figures:
            found = ask(folder)
            reference[:] = reference or found["texts"]
            same = sum(one == other for one, other in zip(found["texts"], reference, strict=True))
            rates = {"per_cpu": found["tokens"] / found["cpu"]}
            rates["rate"] = found["tokens"] / found["wall"]
            return {"wall": found["wall"], "cpu": found["cpu"], "same": same, **rates}

        return measure

    yield Experiment(
        "answers",
        {
            LLAMA: answers(lambda _: by_llama("answers", model, SLOTS, prompts)),
            SEQUENTIAL: answers(lambda _: by_llama("answers", model, 1, prompts)),
            SPOOL: answers(lambda folder: by_spool(folder, model, prompts)),
            API: answers(lambda folder: by_api(folder, model, prompts)),
            CONTEXTS: answers(lambda _: call("spool:by_contexts", model, prompts)),
        },
    )
    for at_once in plan.at_once:
        asked = prompts[: max(at_once, 8)]
        sides = {
            LLAMA: lambda _, n=at_once, asked=asked: by_llama("streams", model, n, asked),
            SPOOL: lambda folder, n=at_once, asked=asked: streams(folder, model, n, asked),
        }
        yield Experiment(f"streams-{at_once}", sides, "streams")
    for sync, count in ((Sync.FULL, plan.queued), (Sync.NONE, 3 * plan.queued)):
        sides = {
            LOOP: lambda folder, sync=sync, count=count: bare_loop(folder, count, sync),
            SPOOL: lambda folder, sync=sync, count=count: queue(folder, count, sync),
        }
        yield Experiment(f"queue-{sync.value}", sides, "queue")
    yield Experiment("requests", {SPOOL: lambda folder: chats(folder, plan.seconds)})
    yield Experiment("start", {SPOOL: lambda folder: starts(folder, plan.started)})


def missing(_: str) -> str | None:
    return None if importlib.util.find_spec("cyllama") else "pip install cyllama brings it"


def body(prompt: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": TOKENS, "temperature": 0, **more}


# -- llama.cpp through its binding: what Penstock is measured by --------------------------


def by_llama(what: str, model: str, at_once: int, prompts: list[str]) -> Figures:
    # The same way of waiting as ours, so that only what is done differs.
    waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    figures: Figures = call(f"spool:llama_{what}", model, at_once, prompts, environment=waiting)
    return figures


def llama_server(model: str, slots: int) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = slots
    params.n_ctx = 1024 * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.verbosity = 0
    params.api_keys = [os.urandom(16).hex()]
    llama = xllamacpp.Server(params)
    llama.handle_chat_completions(body("Hello."))
    return llama


def llama_answers(model: str, slots: int, prompts: list[str]) -> Figures:
    """As many at once as there are slots."""
    llama = llama_server(model, slots)

    def one(prompt: str) -> tuple[int, str]:
        answer = llama.handle_chat_completions(body(prompt))
        return answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"]

    return computed(one, prompts, len(prompts) if slots > 1 else 1)


def computed(one: Callable[[str], tuple[int, str]], prompts: list[str], at_once: int) -> Figures:
    """What so many threads take for all of them in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(one, prompts))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens, texts = sum(count for count, _ in answers), [text for _, text in answers]
    return {"wall": wall, "cpu": cpu, "tokens": tokens, "texts": texts}


def llama_streams(model: str, at_once: int, prompts: list[str]) -> Figures:
    """When the first token comes, and how many come a second."""
    llama = llama_server(model, SLOTS)

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

    begun = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        heard = list(pool.map(one, prompts))
    return streamed(heard, time.perf_counter() - begun)


def streamed(heard: list[tuple[float, int]], wall: float) -> Figures:
    first = median(first for first, _ in heard)
    return {"first_ms": first * 1e3, "rate": sum(count for _, count in heard) / wall}


def by_contexts(file: str, prompts: list[str]) -> Figures:
    """A fresh context for each job, computed alone: the way of the system that seed 004 describes.

    Its workers each make a context of llama.cpp's default of four threads, decode the whole
    prompt, and free it. Through another binding, because ours has no contexts.
    """
    from cyllama.llama import llama_cpp as llama

    llama.disable_logging()
    llama.ggml_backend_load_all()
    model = llama.LlamaModel(file, llama.LlamaModelParams())
    vocab = model.get_vocab()
    head = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\n"
    )

    def one(prompt: str) -> tuple[int, str]:
        said = f"{head}{prompt}<|im_end|>\n<|im_start|>assistant\n"
        tokens = vocab.tokenize(said, True, True)
        params = llama.LlamaContextParams()
        params.n_ctx = len(tokens) + TOKENS + 64
        params.n_threads = params.n_threads_batch = 4
        context = llama.LlamaContext(model, params)
        try:
            return generated(context, tokens)
        finally:
            context.close()

    def generated(context: Any, tokens: list[int]) -> tuple[int, str]:
        sampler = llama.LlamaSampler(llama.LlamaSamplerChainParams())
        sampler.add_greedy()
        context.decode(llama.llama_batch_get_one(tokens))
        said = b""
        for count in range(TOKENS):
            token = sampler.sample(context, -1)
            if vocab.is_eog(token):
                return count, said.decode(errors="replace")
            piece = vocab.token_to_piece(token, 0, True)
            said += piece if isinstance(piece, bytes) else piece.encode()
            context.decode(llama.llama_batch_get_one([token], len(tokens) + count))
        return TOKENS, said.decode(errors="replace")

    one("Hello.")
    return computed(one, prompts, 2)


# -- the spool ----------------------------------------------------------------------------


@asynccontextmanager
async def spool_server(
    folder: Path, model: str, sync: str, workers: int, tells: bool = False
) -> AsyncIterator[str]:
    """Says, if it is asked to, when it claimed what: only for somebody who reads it."""
    from tests.support.fake_llm import FakeRunner

    from penstock.adapters.llama.runner import LlamaRunner
    from penstock.workloads.llm.config import ModelConfig
    from penstock.workloads.spool.server.server import Server as SpoolServer

    config = ModelConfig(models=(model,), slots=SLOTS, context=1024, threads=THREADS)
    runner: Any = FakeRunner() if model == NONE else LlamaRunner(config)
    settings = ServerConfig(workspace=folder, workers=workers, sync=Sync(sync))
    server = SpoolServer(settings, runner)

    def hear(event: JobEvent) -> None:
        if event.what is EventKind.CLAIMED:
            print(event.job_id, time.time_ns(), flush=True)

    server.on_event = hear if tells else None
    await server.start()
    yield "ready"
    await server.stop()


def by_spool(folder: Path, model: str, prompts: list[str]) -> Figures:
    """Submitted, computed and read again; the processor time of all of it."""
    greedy = SpoolOptions(max_tokens=TOKENS, sampling=Sampling(temperature=0))
    work, flow = Work(Workspace(folder)), Flow(Workspace(folder))
    with serving("spool:spool_server", folder, model, "full", SLOTS) as server:
        flow.wait(work.submit("Hello.", options=greedy))
        wall, own, cpu = time.perf_counter(), time.process_time(), cpu_seconds(server.pid)
        ids = [work.submit(prompt, options=greedy) for prompt in prompts]
        found = [flow.wait(job_id) for job_id in ids]
        wall = time.perf_counter() - wall
        cpu = cpu_seconds(server.pid) - cpu + time.process_time() - own
    tokens = sum(one.meta.completion_tokens or 0 for one in found)
    return {"wall": wall, "cpu": cpu, "tokens": tokens, "texts": [one.text for one in found]}


def queue(folder: Path, count: int, sync: Sync) -> Figures:
    """Jobs a second that are submitted, claimed and ended, with nothing computed."""
    workspace = Workspace(folder, sync)
    work, flow = Work(workspace), Flow(workspace)
    with serving("spool:spool_server", folder, NONE, sync.value, 32):
        flow.wait(work.submit("Hello."))
        begun = time.perf_counter()
        for _ in range(count):
            last = work.submit("Hello.")
        flow.wait(last)
        flow.wait_idle()
        return {"rate": count / (time.perf_counter() - begun)}


def starts(folder: Path, count: int) -> Figures:
    """From the call of submit to RUNNING, one job at a time."""
    work, flow, times = Work(Workspace(folder)), Flow(Workspace(folder)), []
    with serving("spool:spool_server", folder, NONE, "full", 8, tells=True) as server:
        for _ in range(count):
            begun = time.time_ns()
            job_id = work.submit("Hello.")
            claimed, at = server.output.readline().split()
            assert claimed.decode() == job_id
            times.append((int(at) - begun) / 1e6)
            flow.wait(job_id)
    return {"p50_ms": median(times), "p99_ms": percentile(times, 0.99)}


def bare_loop(folder: Path, count: int, sync: Sync) -> Figures:
    """Jobs a second by the same files, flushes and renames as a spooled job, and nothing else."""
    is_flushed, meta = sync is Sync.FULL, b"{}" * 100
    places = [folder / name for name in ("input/writing", "input/ready", "processing", "output")]
    for place in places:
        place.mkdir(parents=True)
    writing, ready, processing, output = map(str, places)

    def write(path: str, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, data)
        if is_flushed:
            os.fsync(fd)
        os.close(fd)

    def replace(path: str, data: bytes) -> None:
        write(f"{path}.tmp", data)
        os.rename(f"{path}.tmp", path)

    def flush(folder: str) -> None:
        if is_flushed:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(fd)
            os.close(fd)

    begun = time.perf_counter()
    for n in range(count):
        place = f"{writing}/{n}"
        os.mkdir(place)
        write(f"{place}/prompt.txt", b"Hello.")
        write(f"{place}/meta.json", meta)
        flush(place)
        os.rename(place, f"{ready}/{n}")
        flush(ready)
        os.rename(f"{ready}/{n}", f"{processing}/{n}")
        place = f"{processing}/{n}"
        replace(f"{place}/result.txt", b"HELLO.")
        replace(f"{place}/meta.json", meta)
        flush(place)
        os.rename(place, f"{output}/{n}")
        flush(output)
    return {"rate": count / (time.perf_counter() - begun)}


# -- the OpenAI API -----------------------------------------------------------------------


@asynccontextmanager
async def api_server(folder: Path, model: str) -> AsyncIterator[dict[str, str]]:
    """An engine with its HTTP API and a model, or one that computes nothing."""
    from tests.support.fake_llm import FakeRunner

    from penstock.app.engine import Engine
    from penstock.config.loading import load
    from penstock.workloads.llm.executor import LlmExecutor

    running: Any
    if model == NONE:
        flags = {"data_dir": str(folder), "http": {"listen": "127.0.0.1:0"}, "concurrency": 64}
        running = Engine(load(flags=flags), [LlmExecutor(FakeRunner(), ["fake"])])
    else:
        models = {"models__serve": (model,), "models__slots": SLOTS, "models__context": 1024}
        models |= {"models__threads": THREADS, "http__listen": "127.0.0.1:0"}
        running = penstock.App().run(folder, concurrency=64, **models)
    async with running as engine:
        yield {"url": str(engine.url), "key": (folder / "token").read_text().strip()}


def by_api(folder: Path, model: str, prompts: list[str]) -> Figures:
    """As plain requests; processor time of the engine, the client's left out."""
    with serving("spool:api_server", folder, model) as server:
        asyncio.run(asked(server, ["Hello."] * SLOTS, 1, stream=True))
        cpu = cpu_seconds(server.pid)
        wall, answers = asyncio.run(asked(server, prompts, len(prompts), stream=False))
        cpu = cpu_seconds(server.pid) - cpu
    tokens, texts = sum(count for count, _ in answers), [text for _, text in answers]
    return {"wall": wall, "cpu": cpu, "tokens": tokens, "texts": texts}


def streams(folder: Path, model: str, at_once: int, prompts: list[str]) -> Figures:
    with serving("spool:api_server", folder, model) as server:
        wall, heard = asyncio.run(asked(server, prompts, at_once, stream=True))
    return streamed(heard, wall)


async def asked(server: Server, prompts: list[str], at_once: int, *, stream: bool) -> Any:
    """So many at once, with OpenAI's own client: the seconds of all, and of each the tokens and
    the text, or the seconds to its first token and the tokens."""
    from openai import AsyncOpenAI

    url, key = server.told["url"] + "/v1", server.told["key"]
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        model = (await client.models.list()).data[0].id
        create, room = client.chat.completions.create, asyncio.Semaphore(at_once)

        async def one(prompt: str) -> tuple[Any, Any]:
            async with room:
                begun, first, count = time.perf_counter(), 0.0, 0
                if not stream:
                    done = await create(model=model, **body(prompt))
                    return done.usage.completion_tokens, done.choices[0].message.content
                async for chunk in await create(model=model, **body(prompt, stream=True)):
                    if chunk.choices and chunk.choices[0].delta.content:
                        first = first or time.perf_counter() - begun
                        count += 1
                return first, count

        await one("Hello.")
        begun = time.perf_counter()
        found = await asyncio.gather(*map(one, prompts))
        return time.perf_counter() - begun, found


def chats(folder: Path, seconds: float) -> Figures:
    """Requests answered a second by a model that computes nothing: each is a durable job."""
    request = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
    load = {"method": "POST", "paths": ["/v1/chat/completions"], "body": json.dumps(request)}
    with serving("spool:api_server", folder, NONE) as server:
        host, _, port = server.told["url"].removeprefix("http://").partition(":")
        where = {"address": (host, int(port)), "pid": server.pid, "token": server.told["key"]}
        found = call("load:drive", **where, **load, connections=64, seconds=seconds)
    return {"rate": found["rate"]}


# -- the page -----------------------------------------------------------------------------

ANSWERS = {
    "s": ("wall", "{:.1f}"),
    "CPU s": ("cpu", "{:.1f}"),
    "tokens/s": ("rate", "{:.0f}"),
    "tokens per CPU s": ("per_cpu", "{:.1f}"),
    "of the server's": (f"per_cpu/per_cpu @{LLAMA}", "{:.2f}x"),
    "same text": ("same", "{:.0f}"),
}
STREAMS = {
    "first token, ms: binding": (f"first_ms @{LLAMA}", "{:.0f}"),
    "OpenAI API": ("first_ms", "{:.0f}"),
    "tokens/s: binding": (f"rate @{LLAMA}", "{:.0f}"),
    "OpenAI API's": ("rate", "{:.0f}"),
    "ratio": (f"rate/rate @{LLAMA}", "{:.2f}x"),
}
QUEUE = {
    "the bare loop": (f"rate @{LOOP}", "{:,.0f}"),
    "Penstock's spool": ("rate", "{:,.0f}"),
    "ratio": (f"rate/rate @{LOOP}", "{:.2f}x"),
}


def page(everything: dict[str, Any]) -> str:
    results, plan = everything["results"], everything["plan"]
    asked = f"{plan['prompts']} short prompts, {TOKENS} tokens each, greedy, {THREADS} threads"
    answers = {title: f"answers @{side}" for side, title in TITLES.items()}
    crowds = {f"{n} at once": f"streams-{n}" for n in plan["at_once"]}
    queues = {"flushed": "queue-full", "not flushed": "queue-none"}
    return paged(
        everything,
        judged(goals(results), results, TITLES),
        by_figure(results, answers, ANSWERS, asked),
        by_figure(results, crowds, STREAMS, "streamed, median"),
        by_figure(results, queues, QUEUE, "whole jobs a second, nothing computed"),
    )


def goals(results: Results) -> Iterator[Goal]:
    per_cpu, form = "answers per_cpu", "{:.1f}/s"
    for side in (SPOOL, API):
        work, limit = f"tokens per CPU second: {TITLES[side]}", f"{per_cpu} @{LLAMA}"
        yield Goal(work, f"{per_cpu} @{side}", limit, least=0.97, form=form)
    work, way = f"tokens per CPU second: {TITLES[SPOOL]}", f"{per_cpu} @{CONTEXTS}"
    if look_up(results, way) is not None:
        yield Goal(work, per_cpu, way, least=2.5, form=form)
    yield Goal("submit to RUNNING, p50", "start p50_ms", most=10, form="{:.1f} ms")
    yield Goal("submit to RUNNING, p99", "start p99_ms", form="{:.1f} ms")
    for name, how, least in (("full", "flushed", 0.9), ("none", "not flushed", 0.5)):
        figure = f"queue-{name} rate"
        yield Goal(f"whole jobs, {how}", figure, f"{figure} @{LOOP}", least=least)
    work = "chat requests, durable, with nothing computed"
    yield Goal(work, "requests rate", least=2000)


BENCHMARK = Benchmark(
    "spool.py",
    "The spool and the OpenAI API beside llama.cpp.",
    ("answers", "streams", "queue", "requests", "start"),
    experiments,
    page,
    repeats=5,
    titles=TITLES,
    peers=(CONTEXTS,),
    missing=missing,
    arguments={"--model": {"type": Path, "default": MODEL, "help": "the model that is asked"}},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
