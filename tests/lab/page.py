"""An HTML page as its reader has it."""

from __future__ import annotations

from html.parser import HTMLParser

#: Elements without an end.
_VOID = {"meta", "link", "br", "img", "hr"}


class Page(HTMLParser):
    """What a page holds.

    Attributes:
        title: of the window.
        heads: the text of its first heading.
        tables: each a list of rows, the head first.
        drawings: how many.
        captions: of drawings, how many have words.
        links: what it would load from elsewhere.
        text: all of it but styles and drawings.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.title, self.heads, self.text = "", "", ""
        self.tables: list[list[list[str]]] = []
        self.drawings, self.captions = 0, 0
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "each element ends"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{name}={value}" for name, value in attrs if name in ("src", "href") and value[:1] != "#"]
        self.drawings += tag == "svg"
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "svg" in self._open or "style" in self._open:
            return
        if self._open[-1:] == ["title"]:
            self.title += data
        if "h1" in self._open:
            self.heads += data
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        self.captions += self._open[-1:] == ["figcaption"] and len(data.split()) > 3
        self.text += data
