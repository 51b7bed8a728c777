"""Files and batches over HTTP: there they are OpenAI's, and so are the clients."""

from __future__ import annotations

from typing import Any, NoReturn

from penstock.core.errors import Unavailable


class HttpBatches:
    """Whatever is asked is refused: this client does not speak OpenAI's API."""

    def __getattr__(self, name: str) -> Any:
        return self._refuse

    async def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Unavailable(
            "over HTTP, files and batches are asked for as OpenAI's API has them",
            hint="use the openai package with the engine's URL and /v1, or the engine's socket",
        )
