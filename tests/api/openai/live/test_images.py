"""Images by URL: what is fetched, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.support.openai.door import door, said, saying

from penstock.api.openai import images
from penstock.core.errors import InvalidRequest, TooLarge
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import ChatRequest, ImagePart

CHAT = "/v1/chat/completions"
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def body(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"model": "fake", "messages": [{"role": "user", "content": [part]}]}


@run_async
async def test_an_image_below_an_allowed_source_reaches_the_model_and_no_other_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    async def fetch(session: aiohttp.ClientSession, where: str, url: str, left: int) -> str:
        fetched.append(str(url))
        return PIXEL

    monkeypatch.setattr(images, "_fetched", fetch)
    runner = saying(said("x"))
    allowed = "https://pictures.example/public/"
    async with door(tmp_path, runner, image_sources=(allowed,)) as one:
        assert (await one.call("POST", CHAT, body(f"{allowed}cat.png"))).status == 200
        for url in (
            "https://pictures.example/private/cat.png",
            "https://pictures.example/public/../private/cat.png",
            "https://pictures.example.evil.example/public/cat.png",
            "https://user@pictures.example/public/cat.png",
            "https://127.0.0.1/public/cat.png",
        ):
            refused = await one.call("POST", CHAT, body(url))
            assert refused.status == 400, url
            assert refused.json["error"]["param"] == "messages[0].content[0].image_url.url"
    assert fetched == [f"{allowed}cat.png"]
    (request,) = runner.asks
    assert isinstance(request, ChatRequest)
    content = request.messages[0].content
    assert isinstance(content, tuple)
    (part,) = content
    assert isinstance(part, ImagePart)
    assert part.image_url.url == PIXEL


@asynccontextmanager
async def pictures() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        match request.path:
            case "/cat.png":
                return web.Response(body=b"cat", content_type="image/png")
            case "/large.png":
                return web.Response(body=bytes(3000), content_type="image/png")
            case "/page":
                return web.Response(text="hello")
            case "/moved":
                raise web.HTTPFound("/cat.png")
            case _:
                raise web.HTTPNotFound

    server = web.Application()
    server.router.add_get("/{tail:.*}", answer)
    runner = web.AppRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@run_async
async def test_what_is_fetched_is_an_image_and_no_redirect_is_followed() -> None:
    async with pictures() as url, aiohttp.ClientSession() as session:
        assert await images._fetched(session, "x", f"{url}/cat.png", 9) == (
            "data:image/png;base64,Y2F0"
        )
        for path, why in (("page", "text/plain"), ("moved", "302"), ("nothing", "404")):
            with pytest.raises(InvalidRequest, match=why):
                await images._fetched(session, "x", f"{url}/{path}", 9)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(InvalidRequest, match="can't be fetched"):
            await images._fetched(session, "x", "http://127.0.0.1:9/cat.png", 9)


@run_async
async def test_the_images_of_one_request_are_limited_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pictures() as url, aiohttp.ClientSession() as session:
        assert await images._fetched(session, "x", f"{url}/large.png", 4000)
        with pytest.raises(TooLarge, match="together"):
            await images._fetched(session, "x", f"{url}/large.png", 3999)
    lefts: list[int] = []

    async def fetch(session: aiohttp.ClientSession, where: str, url: str, left: int) -> str:
        lefts.append(left)
        return PIXEL

    monkeypatch.setattr(images, "_fetched", fetch)
    allowed = "https://pictures.example/"
    runner = saying(said("x"))
    async with door(tmp_path, runner, image_sources=(allowed,), max_upload=9000) as one:
        asked = body(f"{allowed}cat.png")
        asked["messages"][0]["content"] *= 2
        assert (await one.call("POST", CHAT, asked)).status == 200
    assert lefts == [9000, 9000 - len(PIXEL)]
