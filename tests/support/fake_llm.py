"""A Runner that computes nothing: for tests of what is around one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

from penstock.workloads.llm.health import RunnerHealth
from penstock.workloads.llm.runner import Loading, ProgressListener
from penstock.workloads.llm.values import (
    ChatRequest,
    Choice,
    Completion,
    Delta,
    EmbeddingRequest,
    EmbeddingResult,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    ModelFacts,
    TokenizeRequest,
    TokenizeResult,
    Usage,
)


class FakeRunner:
    """Says its prompt back, word by word and in upper case; the same each time.

    A prompt that contains a word of `crash_on` kills the engine, with every answer that is under
    way; one with a key of `fail_with` fails with that code.
    """

    engine = "fake 1"

    def __init__(
        self,
        models: Sequence[str] = ("fake",),
        *,
        delay: float = 0.0,
        crash_on: Collection[str] = (),
        fail_with: Mapping[str, LlmCode] | None = None,
        context: int = 4096,
    ) -> None:
        self._facts = {
            name: ModelFacts(name=name, loaded=True, context=context, slots=8) for name in models
        }
        self._default = models[0]
        self._delay, self._context = delay, context
        self._crash_on, self._fail_with = tuple(crash_on), dict(fail_with or {})
        self._generation = 0
        """Grows with each crash."""
        self.asked: list[tuple[str, str]] = []
        """(model, prompt) of everything that was begun."""
        self.running = 0
        self.closed = False
        self.health = RunnerHealth(self)

    def for_tenant(self, tenant: str) -> FakeRunner:
        return self

    async def models(self) -> Sequence[ModelFacts]:
        return list(self._facts.values())

    async def load(self, model: str = "", on_progress: Loading | None = None) -> ModelFacts:
        if model and model not in self._facts:
            raise LlmFailure(LlmCode.MODEL_NOT_FOUND, f"there is no model {model!r}")
        if on_progress is not None:
            on_progress(1.0, "loaded")
        return self._facts[model or self._default]

    async def unload(self, model: str) -> None:
        pass

    async def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        facts = await self.load(model)
        prompt = _prompt(ask, choice)
        self.asked.append((facts.name, prompt))
        words = prompt.split()
        if len(words) > self._context:
            raise LlmFailure(
                LlmCode.CONTEXT_EXCEEDED,
                f"the prompt has {len(words)} tokens; the context has room for {self._context}",
                prompt_tokens=len(words),
                context=self._context,
            )
        for word, code in self._fail_with.items():
            if word in words:
                raise LlmFailure(code, f"{word!r} is in the prompt")
        most = ask.max_tokens or len(words)
        spoken, text = 0, ""
        born = self._generation
        self.running += 1
        try:
            for word in words[:most]:
                await asyncio.sleep(self._delay)
                if any(one in words for one in self._crash_on):
                    self._generation += 1
                if self._generation != born:
                    raise LlmFailure(LlmCode.ENGINE_CRASHED, "the engine died (SIGSEGV)")
                piece = word.upper() if spoken == 0 else " " + word.upper()
                spoken, text = spoken + 1, text + piece
                yield Delta(choice=choice, text=piece)
        finally:
            self.running -= 1
        yield Completion(
            choice=Choice(
                index=choice,
                text=text,
                finish_reason="length" if spoken < len(words) else "stop",
            ),
            usage=Usage(len(words), spoken, 0),
        )

    async def embed(self, model: str, ask: EmbeddingRequest) -> EmbeddingResult:
        facts = await self.load(model)
        vectors = [_vector(str(one)) for one in ask.inputs]
        used = Usage(sum(len(str(one).split()) for one in ask.inputs), 0, 0)
        return EmbeddingResult(
            model=facts.name, engine=self.engine, vectors=tuple(vectors), usage=used
        )

    async def tokenize(self, model: str, ask: TokenizeRequest) -> TokenizeResult:
        """A token for each character: its number."""
        text = ask.text or "".join(str(one.content) for one in ask.messages)
        text = text or "".join(map(chr, ask.tokens))
        return TokenizeResult(
            model=(await self.load(model)).name,
            engine=self.engine,
            tokens=tuple(map(ord, text)),
            text=text,
        )

    async def close(self) -> None:
        self.closed = True
        self.health.close()


def _prompt(ask: GenerationRequest, choice: int) -> str:
    if not isinstance(ask, ChatRequest):
        return str(ask.prompts[choice // ask.n])
    content = ask.messages[-1].content
    return content if isinstance(content, str) else ""


def _vector(text: str) -> tuple[float, ...]:
    """Of length one, by the count of each of four letters."""
    counts = [1.0 + text.count(letter) for letter in "aeio"]
    length = sum(count * count for count in counts) ** 0.5
    return tuple(count / length for count in counts)
