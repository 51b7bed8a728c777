"""A question to a local language model: as text, piece by piece, and in a shape.

It needs the extra `llm` and a model: 'penstock model pull smollm2' fetches a small one.
"""

from __future__ import annotations

import json

import penstock

ANIMAL = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog", "cow"]}},
    "required": ["animal"],
    "additionalProperties": False,
}


def main() -> None:
    pieces: list[str] = []
    answer = penstock.ask("Name three colours.", max_tokens=16, temperature=0, tell=pieces.append)
    print(answer.finish_reason, answer.usage.completion_tokens, "".join(pieces) == answer.text)

    shaped = penstock.ask("Which animal barks?", schema=ANIMAL, max_tokens=32, temperature=0)
    print(json.loads(shaped.text)["animal"] in ("cat", "dog", "cow"))

    again = penstock.ask("Name three colours.", max_tokens=16, temperature=0)
    print("the same greedy text:", again.text == answer.text)


if __name__ == "__main__":
    main()
