"""OpenAI's own client, asking an engine of yours.

It needs 'pip install openai', an engine with a model ('penstock up --model auto'), its URL as the
argument, and a key in PENSTOCK_TOKEN ('penstock key create me --role submit').
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main(url: str, key: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name three colours."}]
    whole = client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, temperature=0
    )
    streamed = client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, temperature=0, stream=True
    )
    text = "".join(choice.delta.content or "" for chunk in streamed for choice in chunk.choices)
    print("streamed as a whole:", text == whole.choices[0].message.content)

    vectors = client.embeddings.create(model=model, input=["a cat", "a dog"]).data
    alike = sum(a * b for a, b in zip(vectors[0].embedding, vectors[1].embedding, strict=True))
    print("alike:", 0 < alike < 1)


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7470"
    main(address, os.environ["PENSTOCK_TOKEN"])
