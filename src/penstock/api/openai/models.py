"""The models that workers serve: found by name for every request, and `GET /v1/models`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from penstock.api.openai.errors import ModelNotFound
from penstock.api.operation import route
from penstock.api.reply import Reply, json_reply
from penstock.core.errors import InvalidRequest
from penstock.ports.clock import Clock
from penstock.ports.engine_api import EngineApi
from penstock.workloads.llm.values import topics_by_model

if TYPE_CHECKING:
    from penstock.api.call import Call

_FRESH = 1.0
"""Seconds for which a model's presence is cached."""


class ServedModel(Struct, frozen=True):
    name: str
    topic: str
    since: float
    """When it was first seen."""
    paused: str = ""
    """Why it can't be used at present."""
    facts: Mapping[str, Any] = {}
    """What its worker reports: `context`, `size`, `architecture` and so on."""


class Served:
    """Asks the EngineApi at most once a second, and for each model that was unknown."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, ServedModel] = {}
        self._until = float("-inf")

    async def find(self, api: EngineApi, name: str) -> ServedModel | None:
        if self._clock.monotonic() >= self._until or name not in self._known:
            await self._look(api)
        return self._known.get(name)

    async def list(self, api: EngineApi) -> list[ServedModel]:
        """By name."""
        await self._look(api)
        return list(self._known.values())

    async def _look(self, api: EngineApi) -> None:
        served = topics_by_model(await api.topics())
        status = await api.status()
        paused, facts = status.paused_topics, status.models
        now = self._clock.now()
        self._known = {
            name: ServedModel(
                name, topic, self._since(name, now), paused.get(topic, ""), facts.get(topic, {})
            )
            for name, topic in sorted(served.items())
        }
        self._until = self._clock.monotonic() + _FRESH

    def _since(self, name: str, now: float) -> float:
        known = self._known.get(name)
        return now if known is None else known.since


_ANY = ("", "auto", "default")
_LATEST = ":latest"
"""The tag that Ollama's clients add to a name."""


async def find_model(call: Call, name: str) -> ServedModel:
    """The model of that name; the only one, if none is named. Raises ModelNotFound."""
    models = call.services.models
    found = await models.find(call.api, name)
    if found is None and name.endswith(_LATEST):
        found = await models.find(call.api, name.removesuffix(_LATEST))
    if found is not None:
        return found
    served = await models.list(call.api)
    if name in _ANY and len(served) == 1:
        return served[0]
    names = ", ".join(one.name for one in served)
    hint = f"this server has: {names}" if served else "this server has no model"
    if not name:
        raise InvalidRequest("model", "is missing", hint=hint)
    raise ModelNotFound(
        f"The model `{name[:120]}` does not exist or you do not have access to it.", hint=hint
    )


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    """When this server first saw it, in seconds since the epoch."""
    owned_by: Literal["penstock"] = "penstock"
    max_model_len: int | None = None
    """Tokens that one request may have, prompt and answer. As vLLM names it."""
    context_length: int | None = None
    """The same, as OpenRouter and others name it."""
    state: str | None = None
    """Of its engine: loading, ready, ill or gone (not in memory; the next request loads it)."""
    cause: str | UnsetType = UNSET
    """Why it is ill."""

    @classmethod
    def of(cls, served: ServedModel) -> Model:
        context = served.facts.get("context") or served.facts.get("train_context") or None
        return cls(
            id=served.name,
            created=int(served.since),
            max_model_len=context,
            context_length=context,
            state=served.facts.get("state"),
            cause=served.facts.get("cause", UNSET),
        )


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[Model, ...]


@route("GET /v1/models", answer=ModelList)
async def list_models(call: Call) -> Reply:
    """List the models that are served."""
    served = await call.services.models.list(call.api)
    return json_reply(ModelList(data=tuple(map(Model.of, served))))


@route("GET /v1/models/{model}", answer=Model, refusals=(404,))
async def get_model(call: Call) -> Reply:
    """Get a model."""
    return json_reply(Model.of(await find_model(call, call.params["model"])))
