"""What examples/finetune trains on: text out of this Python alone, and a tokenizer that knows all of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")

FILE = Path(__file__).parents[2] / "examples" / "finetune" / "data.py"


@pytest.fixture(scope="module")
def data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_data", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def texts(data: ModuleType) -> list[str]:
    return [row["text"] for row in data.python_questions(seed=0)]


def test_questions_and_answers(data: ModuleType, texts: list[str]) -> None:
    """Enough for 60 steps of 1,024 tokens, the same each time, in another order for another seed."""
    assert sum(map(len, texts)) > 4 * 60 * 1024
    assert all(data.QUESTION in text and data.ANSWER in text for text in texts)
    assert [row["text"] for row in data.python_questions(seed=0)] == texts
    other = [row["text"] for row in data.python_questions(seed=1)]
    assert other != texts and sorted(other) == sorted(texts)


def test_no_text_hangs_on_one_guess(texts: list[str]) -> None:
    """No tables, and nothing but letters and digits more than eight times in a row: the loss of a batch of such rows
    says nothing about how two runs agree."""
    assert not [text for text in texts if re.search(r"([^\w\s]| )\1{8,}", text)]
    assert not [text for text in texts if re.search(r"^ *\+-+\+", text, re.MULTILINE)]


def test_tokenizer_knows_every_text(data: ModuleType, texts: list[str]) -> None:
    tokenizer = data.byte_tokenizer()
    for text in [*texts[:50], "Größe 数 \N{PARTY POPPER}"]:
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text


def test_rows_of_the_users_own(data: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n{"messages": []}\n')
    assert data.read_rows(tmp_path / "rows.jsonl") == [{"text": "a"}, {"messages": []}]
    (tmp_path / "rows.txt").write_text("one\nparagraph\n\n\nanother\n")
    assert data.read_rows(tmp_path / "rows.txt") == [{"text": "one\nparagraph"}, {"text": "another"}]
    for name, content, message in (
        ("bad.jsonl", '{"text": 1}\n[1]\n', "line 2: expected a JSON object"),
        ("bad.jsonl", "{", "line 1"),
        ("empty.txt", "\n \n", "holds no rows"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            data.read_rows(tmp_path / name)
