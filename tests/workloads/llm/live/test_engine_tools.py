"""Tools, where the template knows them: with the small model, which was given another one."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from penstock.adapters.llama.runner import LlamaRunner
from penstock.testing.aio import run_async
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.runner import answer
from penstock.workloads.llm.values import ChatRequest, Message, Sampling, ToolCall, ToolFunction

TEMPLATE = """{% if tools %}{{ tools|tojson }}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"""
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
USER = Message(role="user", content="Look")


@pytest.fixture
def handy(tmp_path: Path, model_file: Path) -> Path:
    """The model with a template as long as its own."""
    data = model_file.read_bytes()
    key = b"tokenizer.chat_template"
    at = data.index(key) + len(key) + 4  # after the type of its value
    (length,) = struct.unpack_from("<Q", data, at)
    file = tmp_path / "handy.gguf"
    file.write_bytes(data[: at + 8] + TEMPLATE.ljust(length).encode() + data[at + 8 + length :])
    return file


@run_async
async def test_tools_and_their_calls_are_shown_to_the_model(handy: Path) -> None:
    runner = LlamaRunner(ModelConfig(models=(str(handy),), slots=1, context=256))
    facts = await runner.load()

    async def tokens(*messages: Message, tools: tuple[dict[str, object], ...] = ()) -> int:
        ask = ChatRequest(
            messages=messages, tools=tools, max_tokens=1, sampling=Sampling(temperature=0)
        )
        return (await answer(runner, "", ask)).usage.prompt_tokens

    call = ToolCall(id="c1", function=ToolFunction("look", '{"at": "sea"}'))
    asked = Message(role="assistant", tool_calls=(call,))
    told = Message(role="tool", content="wet", tool_call_id="c1")
    bare = await tokens(USER)
    shown = await tokens(USER, tools=(TOOL,))
    answered = await tokens(USER, asked, told, tools=(TOOL,))
    await runner.close()

    assert facts.tools is True
    assert bare + 15 < shown < answered - 15
