"""The models that can be asked: `GET /v1/models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import UNSET, Struct, UnsetType

from penstock.api.openai.errors import OpenAiOperation
from penstock.api.openai.model_job import find_model
from penstock.api.reply import Reply, json_reply
from penstock.api.served import ServedModel

if TYPE_CHECKING:
    from penstock.api.call import Call


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


async def list_models(call: Call) -> Reply:
    served = await call.services.models.list(call.api)
    return json_reply(ModelList(data=tuple(map(Model.of, served))))


async def get_model(call: Call) -> Reply:
    return json_reply(Model.of(await find_model(call, call.params["model"])))


OPERATIONS = (
    OpenAiOperation(
        "GET",
        "/v1/models",
        list_models,
        answer=ModelList,
        summary="List the models that are served",
    ),
    OpenAiOperation(
        "GET",
        "/v1/models/{model}",
        get_model,
        answer=Model,
        refusals=(404,),
        summary="Get a model",
    ),
)
