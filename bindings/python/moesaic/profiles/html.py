"""A report of a profile as one HTML file that needs nothing else: no network, no server."""

from __future__ import annotations

import json
from pathlib import Path

from moesaic.profiles.document import PARENTS, TRANSFERS, Document
from moesaic.profiles.idle import idle_between

__all__ = ["render"]

_MOST_EVENTS = 40_000
_MOST_IDLE = 20


def render(document: Document) -> str:
    """The report; the document itself is embedded, and the page reads all of its numbers from it."""
    shown = dict(document, parents=sorted(PARENTS | TRANSFERS), idle=[])
    if document.get("trace"):
        trace = document["trace"]
        shown["idle"] = idle_between(trace, document["threads"])[:_MOST_IDLE]
        threads = [dict(thread) for thread in trace["threads"]]
        longest = max((len(thread["events"]) for thread in threads), default=0)
        shown["trace"] = dict(trace, threads=threads, left_out=0)
        budget = _MOST_EVENTS // max(len(threads), 1)
        if longest > budget:
            for thread in threads:
                kept = sorted(thread["events"], key=lambda event: -event[2])[:budget]
                shown["trace"]["left_out"] += len(thread["events"]) - len(kept)
                thread["events"] = sorted(kept, key=lambda event: (event[1], -event[2]))
    data = json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    return page.replace("/*DOCUMENT*/null", data, 1)
