"""An AI agent: topics are its tools (MCP)."""

from __future__ import annotations

import penstock
from scenarios.scenario import Scenario, Stage, Story, expect


def lacking() -> str:
    try:
        import mcp  # noqa: F401  # whether it is there
    except ImportError:
        return "the extra is not installed: pip install 'penstock[mcp]'"
    return ""


async def tool(stage: Stage) -> Story:
    """An agent with the key of a tenant calls a tool over HTTP."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    roles = (penstock.KeyRole.SUBMIT,)
    key = await stage.ps.keys.acreate("agent", roles, tenant="acme")
    headers = {"Authorization": f"Bearer {key.token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{stage.ps.url}/mcp", http_client=http)) as agent,
    ):
        tools = (await agent.list_tools()).tools
        answer = await agent.call_tool("text__shout", {"text": "from an agent"})
    said = answer.structured_content
    expect(said["result"] == "FROM AN AGENT!", f"it was told {said}")
    return Story(await stage.ps.aget(said["job_id"]), f"{len(tools)} tools; {said['result']}")


SCENARIOS = [Scenario("a tool of an AI agent (MCP)", "job.text.shout", "SUCCEEDED", tool, lacking)]
