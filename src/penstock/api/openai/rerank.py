"""`/v1/rerank`: documents by how near they are to a query, through the model's embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.api.openai.answers import EmbeddingUsage, JobOrigin
from penstock.api.openai.endpoints import Endpoint
from penstock.api.openai.requests import Asking
from penstock.core.errors import InvalidRequest
from penstock.workloads.llm.values import EmbeddingRequest, EmbeddingResult


class RerankDocument(Struct, frozen=True):
    text: str


class RerankBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A query, and documents to sort by relevance. As Cohere and Jina write it."""

    given = "documents"
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[tuple[str | RerankDocument, ...], Meta(min_length=1, max_length=2047)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    """Number of results; all by default."""
    return_documents: bool | None = None
    max_chunks_per_doc: Any = None
    """Ignored."""


class RerankResult(Struct, frozen=True, kw_only=True):
    index: int
    relevance_score: float
    """Cosine similarity of query and document, from -1 to 1."""
    document: RerankDocument | UnsetType = UNSET


class RerankList(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    model: str
    results: tuple[RerankResult, ...]
    usage: EmbeddingUsage


def embedding_request(body: RerankBody, options: Mapping[str, Any]) -> EmbeddingRequest:
    texts = tuple(_text(document) for document in body.documents)
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"documents[{index}]", "is empty")
    return EmbeddingRequest(inputs=(body.query, *texts))


def _text(document: str | RerankDocument) -> str:
    return document if isinstance(document, str) else document.text


def rerank_list(body: RerankBody, origin: JobOrigin, result: EmbeddingResult) -> RerankList:
    query, *documents = result.vectors
    scores = [sum(a * b for a, b in zip(query, one, strict=True)) for one in documents]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    used = result.usage.prompt_tokens
    return RerankList(
        id=f"rerank-{origin.job_id}",
        model=origin.model,
        results=tuple(
            RerankResult(
                index=index,
                relevance_score=scores[index],
                document=RerankDocument(_text(body.documents[index]))
                if body.return_documents
                else UNSET,
            )
            for index in order[: body.top_n]
        ),
        usage=EmbeddingUsage(used, used),
    )


RERANK = Endpoint(
    path="/v1/rerank",
    name="create_rerank",
    body=RerankBody,
    request=embedding_request,
    result=EmbeddingResult,
    answer=RerankList,
    whole=rerank_list,
    large=False,
    summary="Sort documents by relevance to a query",
    description="By the cosine similarity of the model's embeddings. One job, as for a chat.",
)
OPERATIONS = (RERANK.operation(),)
