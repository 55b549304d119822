"""`kvstrata quality --retrieval`: questions read, cut to size, asked, and counted right or wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

import pytest

from kvstrata.cli.app import main
from kvstrata.engine.retrieval import Question, read_questions, spread
from kvstrata.errors import ConfigError

PAIRS = [(str(uuid5(NAMESPACE_URL, f"key {n}")), str(uuid5(NAMESPACE_URL, f"value {n}"))) for n in range(20)]


def record(at: int) -> dict[str, object]:
    return {"ordered_kv_records": PAIRS, "key": PAIRS[at][0], "value": PAIRS[at][1]}


def write(path: Path, *places: int) -> Path:
    text = "".join(json.dumps(record(at)) + "\n" for at in places)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz"])
def test_questions_are_read_from_a_file_and_from_a_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, 3, 19)
    (tmp_path / "notes.txt").write_text("no question")
    for path in (tmp_path / name, tmp_path):
        assert [question.value for question in read_questions(path)] == [PAIRS[3][1], PAIRS[19][1]]


@pytest.mark.parametrize("at", [0, 3, 10, 19])
@pytest.mark.parametrize("num_keys", [1, 4, 20, 50])
def test_a_cut_question_keeps_its_pair_among_neighbours(at: int, num_keys: int) -> None:
    question = Question(tuple(PAIRS), *PAIRS[at])
    cut = question.cut(num_keys, num_keys // 2)
    assert PAIRS[at] in cut.pairs
    assert len(cut.pairs) == min(num_keys, 20)
    start = PAIRS.index(cut.pairs[0])
    assert list(cut.pairs) == PAIRS[start : start + num_keys]
    assert f'Key: "{PAIRS[at][0]}"' in cut.prompt()


def test_what_is_asked_for_comes_at_each_place_in_turn() -> None:
    questions = [Question(tuple(PAIRS), *PAIRS[10])] * 4
    places = [question.pairs.index(PAIRS[10]) for question in spread(questions, 4)]
    assert places == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "line",
    ["no json", "[]", '{"key": "a", "value": "b"}', '{"ordered_kv_records": [], "key": "a", "value": "b"}'],
)
def test_lines_that_are_no_questions_are_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "q.jsonl", 1)
    path.write_text(path.read_text() + line)
    with pytest.raises(ConfigError, match=r"q\.jsonl'; line 2 has no ordered_kv_records"):
        read_questions(path)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it holds no question"):
        read_questions(tmp_path)
    (tmp_path / "q.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match="it cannot be read"):
        read_questions(tmp_path)


def test_the_model_finds_values_and_the_share_is_told(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "q.jsonl", 2, 7, 11)
    arguments = ["quality", "--model", str(smollm2_path), "--retrieval", str(path), "--kv-memory", "128MiB"]
    assert main([*arguments, "--keys", "1", "--kv-dtype", "fp32,int8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["keys"], result["prompts"]) == (1, 3)
    assert [run["kv_dtype"] for run in result["runs"]] == ["fp32", "int8"]
    for run in result["runs"]:
        assert run["share_right"] == run["right"] / 3
        assert run["right"] >= 2
    assert main([*arguments, "--prompts", "2"]) == 0
    table = capsys.readouterr()
    assert "2 questions among" in table.out
    assert "of the values among 1 keys" in table.err
