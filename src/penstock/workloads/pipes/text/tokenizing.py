"""What a model is given: a conversation through its own template, or text as it is, as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from penstock.workloads.llm.values import (
    LLAMA_OPTIONS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    Message,
    Sampling,
    TextPart,
    TokenizeRequest,
)
from penstock.workloads.pipes.text.constraint import Constraints, is_constrained
from penstock.workloads.pipes.text.sampler import Sampler, completed, seed_of
from penstock.workloads.pipes.text.vocabulary import Vocabulary
from penstock.workloads.pipes.text.writer import CLOSE, OPEN, Thinking, Writer

_MODELS_OWN = ("temperature", "top_k", "top_p", "min_p")
"""Of what a model recommends, that which llama.cpp takes from it too."""
_ENDS = {
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<EOT>"),
}
"""Names of tokens that end an answer in every model that has them: GGUF files tell one at most."""
_WORD = "penstock"


class Text:
    """All of a model that has to do with text."""

    def __init__(
        self, tokenizer: Any, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> None:
        """Raises NOT_SUPPORTED if text can't be made of its tokens here."""
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # Set by who trained it; a prompt would be cut off without a word.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._generation = generation or {}
        self.vocabulary = Vocabulary(tokenizer)
        self.vocab_size = int(config.get("vocab_size") or len(tokenizer))
        self.ends = self._ends(config)
        """Tokens that end an answer."""
        self._constraints = Constraints(tokenizer, self.ends, self.vocab_size)
        self._thinks = CLOSE in str(tokenizer.chat_template or "")
        self._begins_thinking = self._thinks and self._ends_with(OPEN)

    # -- prompts ---------------------------------------------------------------------

    def prompt_of(self, ask: GenerationRequest, choice: int = 0) -> list[int]:
        """Raises INVALID_PROMPT or NOT_SUPPORTED."""
        if isinstance(ask, ChatRequest):
            return self.tokenize(self.written(ask))
        number = choice // ask.n
        if number >= len(ask.prompts):
            raise ValueError(f"there is no choice {choice}")
        prompt = ask.prompts[number]
        if not prompt:
            raise LlmFailure(LlmCode.INVALID_PROMPT, "the prompt is empty")
        if isinstance(prompt, str):
            return self.tokenize(prompt, bare=True)
        return self._checked(prompt)

    def written(self, ask: ChatRequest) -> str:
        """The conversation as its template writes it, up to where the model goes on. That is
        after what it has said already, if the last message is its own."""
        self._check(ask)
        messages, said = ask.messages, ""
        if messages[-1].role == "assistant":
            messages, said = messages[:-1], _content(messages[-1])
            if messages and messages[-1].role == "assistant":
                raise LlmFailure(
                    LlmCode.INVALID_PROMPT,
                    "the last two messages are both the assistant's, and only one can be gone"
                    " on from",
                )
        plain = [_plain(message) for message in messages]
        return self._templated(plain, **_template_options(ask)) + said

    def tokenize(self, text: str, *, bare: bool = False) -> list[int]:
        """`bare` text gets the tokens in front that the model expects; a template writes them
        itself."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise LlmFailure(LlmCode.INVALID_PROMPT, "the prompt is not valid Unicode") from None
        if self._backend is not None:
            # `encode` would keep all other threads waiting, the event loop's among them.
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=bare)
            tokens = list(encoded.ids)
        else:
            tokens = list(self._tokenizer.encode(text, add_special_tokens=bare))
        if not tokens:
            raise LlmFailure(LlmCode.INVALID_PROMPT, "the prompt is empty")
        return tokens

    def tokens_and_text(self, ask: TokenizeRequest) -> tuple[list[int], str]:
        """What a request to tokenize is answered with. Raises INVALID_PROMPT."""
        if ask.tokens:
            tokens = self._checked(ask.tokens)
            return tokens, str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        text, bare = ask.text or "", ask.add_special
        if ask.messages:
            text, bare = self.written(ChatRequest(messages=ask.messages)), False
        return (self.tokenize(text, bare=bare) if text else []), text

    # -- answers ---------------------------------------------------------------------

    def sampling(self, sampling: Sampling) -> Sampling:
        """With all that was left open: as the model recommends it, else as llama.cpp does it."""
        return completed(sampling, {name: self._generation.get(name) for name in _MODELS_OWN})

    def sampler(self, ask: GenerationRequest, choice: int = 0) -> Sampler:
        """Raises INVALID_SCHEMA or NOT_SUPPORTED. Takes long for an answer that is held to a
        schema or a grammar (`is_constrained`): up to seconds for the largest."""
        _check_options(ask)
        sampling, seed = self.sampling(ask.sampling), seed_of(ask, choice)
        return Sampler(sampling, seed, ask.logprobs, self._constraints.of(ask))

    def writer(self, ask: GenerationRequest, max_tokens: int, choice: int = 0) -> Writer:
        begins = isinstance(ask, ChatRequest) and ask.messages[-1].role != "assistant"
        thinking = None
        if begins and self._thinks and not is_constrained(ask):
            thinking = Thinking(begun=self._begins_thinking)
        return Writer(
            *(self.vocabulary, self.ends, max_tokens, ask.stop, choice),
            continues=not begins,
            thinking=thinking,
        )

    # -- inside ----------------------------------------------------------------------

    def _check(self, ask: ChatRequest) -> None:
        if not self._tokenizer.chat_template:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                "this model has no chat template: give it a prompt to complete",
            )
        if ask.tools and ask.tool_choice != "none":
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                "tools can't be given to a model that is split over nodes",
                tools=False,
            )
        if any(not isinstance(part, TextPart) for one in ask.messages for part in _parts(one)):
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED, "a model that is split over nodes does not support images"
            )

    def _templated(self, messages: list[dict[str, Any]], **more: Any) -> str:
        more = {"add_generation_prompt": True, **more}
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **more))
        except Exception as refused:  # a template is a program of the model's maker
            why = str(refused) or type(refused).__name__
            raise LlmFailure(
                LlmCode.INVALID_PROMPT, f"the model's chat template refuses this: {why}"
            ) from None

    def _checked(self, prompt: tuple[int, ...]) -> list[int]:
        for token in prompt:
            if not 0 <= token < self.vocab_size:
                raise LlmFailure(
                    LlmCode.INVALID_PROMPT,
                    f"the prompt contains invalid tokens: {token}, and the vocabulary has"
                    f" {self.vocab_size}",
                )
        return list(prompt)

    def _ends(self, config: Mapping[str, Any]) -> frozenset[int]:
        special = self.vocabulary.specials
        told = (
            *_listed(config.get("eos_token_id")),
            *_listed(self._generation.get("eos_token_id")),
            *_listed(self._tokenizer.eos_token_id),
            *self._ends_of_turn(),
            *(one for one in special if self.vocabulary.name_of(one).decode() in _ENDS),
        )
        return frozenset(int(token) for token in told)

    def _ends_with(self, mark: str) -> bool:
        """Whether the template leaves the model with it."""
        try:
            return self._templated([{"role": "user", "content": "?"}]).rstrip().endswith(mark)
        except LlmFailure:
            return False

    def _ends_of_turn(self) -> list[int]:
        """What the template writes after an answer."""
        if not self._tokenizer.chat_template:
            return []
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WORD}]
        try:
            written = self._templated(turns, add_generation_prompt=False)
            after = self.tokenize(written.rpartition(_WORD)[2].lstrip())
        except LlmFailure:
            return []
        return after[:1] if after[0] in self.vocabulary.specials else []


_TEMPLATE_OPTIONS = ("enable_thinking", "reasoning_effort", "thinking")
"""Variables of templates that a request may set; others would change what is rendered, and how."""


def _template_options(ask: ChatRequest) -> dict[str, Any]:
    given = ask.template_options
    return {name: given[name] for name in _TEMPLATE_OPTIONS if name in given}


def _check_options(ask: GenerationRequest) -> None:
    """Raises NOT_SUPPORTED."""
    own = [name for name in LLAMA_OPTIONS if getattr(ask.sampling, name) is not None]
    if isinstance(ask, CompletionRequest) and ask.suffix is not None:
        own.append("suffix")
    if own:
        raise LlmFailure(
            LlmCode.NOT_SUPPORTED,
            f"not supported by a model that is split over nodes: {', '.join(own)}",
        )


def _plain(message: Message) -> dict[str, Any]:
    """As templates read it."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    # `developer` is a newer word, which templates don't know.
    role = "system" if message.role == "developer" else message.role
    plain |= {"role": role, "content": _content(message)}
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _value(call["function"].get("arguments", ""))
    return plain


def _value(arguments: str) -> Any:
    """Templates take the arguments of a call as a value, not as the JSON that OpenAI has there."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments


def _content(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in _parts(message) if isinstance(part, TextPart))


def _parts(message: Message) -> tuple[Any, ...]:
    return message.content if isinstance(message.content, tuple) else ()


def _listed(told: Any) -> Iterable[int]:
    if told is None:
        return ()
    return (told,) if isinstance(told, int) else tuple(told)
