"""Text to train on, and a tokenizer for it, out of nothing but the Python that runs this."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

#: Modules of the standard library that every CPython has, and that may be imported without consequences.
MODULES = """
abc argparse array ast asyncio base64 bisect builtins calendar cmath codecs collections collections.abc
concurrent.futures configparser contextlib copy csv ctypes dataclasses datetime decimal difflib dis
email.message enum fileinput fnmatch fractions ftplib functools gc getpass gettext glob gzip hashlib heapq hmac
html http.client http.cookies imaplib inspect io ipaddress itertools json locale logging lzma mailbox math
mimetypes multiprocessing numbers operator os os.path pathlib pickle pkgutil platform plistlib poplib pprint
queue random re sched secrets selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl stat
statistics string struct subprocess symtable sys tarfile tempfile textwrap threading time timeit token tokenize
traceback types typing unittest unittest.mock urllib.parse urllib.request uuid warnings wave weakref webbrowser
xml.dom.minidom xml.etree.ElementTree zipfile zlib
"""

#: The lines of tables, rulers and padding: the same token again and again. What a model says of one of them it says of
#: a hundred, and so the loss of a whole batch hangs on a single guess, on which two equally good runs may differ.
_TABLE_LINE = re.compile(r"^ *(\+[-=+]+\+|\|.*\|) *\n?", re.MULTILINE)
_RULER = re.compile(r"([^\w\s]| )\1{8,}")

QUESTION, ANSWER = "Question: ", "\nAnswer: "


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, and three special ones: needs no file and knows every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def python_questions(seed: int = 0) -> list[dict[str, str]]:
    """Questions about Python and their answers, from the docstrings of the standard library and the language reference
    that ``help()`` shows: ``{"text": "Question: ...\\nAnswer: ..."}``, shuffled."""
    pairs = [*_docstrings(), *_language_reference()]
    random.Random(seed).shuffle(pairs)
    return [{"text": f"{QUESTION}{question}{ANSWER}{answer}"} for question, answer in pairs]


def _docstrings() -> list[tuple[str, str]]:
    pairs = []
    for name in MODULES.split():
        try:
            module = importlib.import_module(name)
        except ImportError:  # built without an optional library
            continue
        pairs.append((f"What is the module {name} for?", _first_paragraphs(module)))
        for attribute, value in vars(module).items():
            public = not attribute.startswith("_") and getattr(value, "__module__", None) in (name, f"_{name}")
            if public and (inspect.isroutine(value) or inspect.isclass(value)):
                pairs.append((f"What does {name}.{attribute} do?", _first_paragraphs(value)))
    return sorted((question, answer) for question, answer in pairs if len(answer) >= 20)


def _first_paragraphs(value: Any, limit: int = 400) -> str:
    text = _plain(inspect.getdoc(value) or "")
    return text[:limit].rsplit("\n\n", 1)[0].strip() if len(text) > limit else text.strip()


def _plain(text: str) -> str:
    """The text without tables, and with no character but letters and digits more than eight times in a row."""
    return _RULER.sub(lambda run: run[1] * 8, _TABLE_LINE.sub("", text))


def _language_reference(limit: int = 800) -> list[tuple[str, str]]:
    from pydoc_data.topics import topics

    pairs = []
    for topic, text in sorted(topics.items()):
        paragraphs, answer = _plain(text).split("\n\n"), ""
        for paragraph in paragraphs:
            answer = f"{answer}\n\n{paragraph.strip()}".strip()
            if len(answer) >= limit:
                pairs.append((f"What does Python's reference say about {topic}?", answer[: 2 * limit]))
                answer = ""
        if len(answer) >= 100:
            pairs.append((f"What does Python's reference say about {topic}?", answer))
    return pairs


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of the user's own: a ``.jsonl`` file in any format that SFTTrainer takes (``text``, ``prompt`` and
    ``completion``, or ``messages``), or a text file whose paragraphs are the rows.

    Raises:
        ValueError: the file holds no rows, or a line is no JSON object.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        rows = []
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number}: expected a JSON object")
                rows.append(row)
    else:
        rows = [{"text": paragraph.strip()} for paragraph in content.split("\n\n") if paragraph.strip()]
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows
