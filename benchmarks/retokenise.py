"""How often the text of an answer becomes other token ids when it is encoded again for the next turn.

A chat client sends texts, not ids. Where an answer's text encodes to other ids than the model chose, the blocks
from there on are computed again; all blocks before are hits all the same.

Usage: python benchmarks/retokenise.py [QUESTIONS.jsonl]     lines with "turns": [text, ...]; else own questions
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvstrata import LLM, SamplingParams

OWN = [
    f"{task} {topic}."
    for task in (
        "Explain in three sentences",
        "Write a short poem about",
        "List five facts about",
        "Tell a joke about",
    )
    for topic in (
        "the tides",
        "bread",
        "prime numbers",
        "the colour blue",
        "a lighthouse",
        "sorting a list in Python",
    )
]


def main() -> None:
    questions = OWN
    if len(sys.argv) > 1:
        lines = Path(sys.argv[1]).read_text().splitlines()
        questions = [json.loads(line)["turns"][0] for line in lines if line.strip()]
    llm = LLM(kv_memory="1GiB")
    figures = {}
    for name, params in (
        ("greedy", SamplingParams(temperature=0, max_tokens=128)),
        ("temperature 1", SamplingParams(temperature=1, seed=1, max_tokens=128)),
    ):
        same = missed = tokens = 0
        for result in llm.chat([[{"role": "user", "content": q}] for q in questions], params):
            answer = result.outputs[0]
            ids = [t for t in answer.token_ids if t not in llm.tokenizer.special_ids]
            again = llm.tokenizer.encode(answer.text, add_special_tokens=False)
            agree = next((i for i, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), len(ids))
            same += ids == again
            missed += len(ids) - agree
            tokens += len(ids)
        figures[name] = {
            "answers": len(questions),
            "same_ids": same / len(questions),
            "answer_tokens_computed_again": missed / max(tokens, 1),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
