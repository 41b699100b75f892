"""Line numbers of the fields of a TOML text.

tomllib gives no line numbers, which error messages need. It has parsed the text before this runs,
so the text is valid, and the walk below only finds where tokens end.
"""

import re
import tomllib
from bisect import bisect_right
from collections.abc import Sequence

Path = tuple[str | int, ...]

_TRIVIA = re.compile(r"(?:[ \t\n]+|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_SCALAR = re.compile(
    r'''"""(?:[^\\]|\\.)*?"""(?:"{0,2})'''
    r"""|'{3}.*?'{3}(?:'{0,2})"""
    r'''|"(?:[^"\\\n]|\\.)*"'''
    r"""|'[^'\n]*'"""
    r"""|[^,\]}#\n]+""",
    re.DOTALL,
)


class LineIndex:
    """Maps a field's path, such as ("prompts", "min_chars"), to its line, counted from 1."""

    def __init__(self, text: str) -> None:
        """Walk `text`, which must be valid TOML."""
        self._text = text.replace("\r\n", "\n")
        self._starts = [0] + [m.end() for m in re.finditer("\n", self._text)]
        self._pos = 0
        self._array_lengths: dict[Path, int] = {}
        self.lines: dict[Path, int] = {}
        self._walk()

    def known_path(self, loc: Sequence[str | int]) -> Path:
        """The parts of `loc` that the text holds, in order.

        A missing field ends at its table, and parts that only a validator knows (the names
        of a union's members) are left out.
        """
        path: Path = ()
        for part in loc:
            if (*path, part) in self.lines:
                path += (part,)
        return path

    def line_of(self, loc: Sequence[str | int]) -> int:
        """Line of the field at `loc`, or of the nearest table around it; 1 for the document."""
        return self.lines.get(self.known_path(loc), 1)

    def _walk(self) -> None:
        table: Path = ()
        self._skip(_TRIVIA)
        while self._pos < len(self._text):
            if self._text[self._pos] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_TRIVIA)

    def _header(self) -> Path:
        """Read `[a.b]` or `[[a.b]]`; returns the path of the table that it opens."""
        start = self._pos
        is_array = self._text.startswith("[[", start)
        self._pos += 2 if is_array else 1
        parts = self._dotted_key()
        self._pos += 2 if is_array else 1
        path: Path = ()
        for depth, part in enumerate(parts):
            path += (part,)
            self._note(path, start)
            if path in self._array_lengths and (depth < len(parts) - 1 or not is_array):
                # [a.b] below [[a]] means the newest element of a.
                path += (self._array_lengths[path] - 1,)
        if is_array:
            index = self._array_lengths.get(path, 0)
            self._array_lengths[path] = index + 1
            path += (index,)
        self.lines[path] = self._line(start)
        return path

    def _pair(self, table: Path) -> None:
        """Read `key = value`, where the key may be dotted."""
        start = self._pos
        path = table
        for part in self._dotted_key():
            path += (part,)
            self._note(path, start)
        self._pos += 1  # the equals sign
        self._skip(_BLANK)
        self._value(path)

    def _value(self, path: Path) -> None:
        opener = self._text[self._pos]
        if opener not in "[{":
            self._skip(_SCALAR)
            return
        closer = "]" if opener == "[" else "}"
        self._pos += 1
        self._skip(_TRIVIA)
        index = 0
        while self._text[self._pos] != closer:
            if opener == "[":
                self._note((*path, index), self._pos)
                self._value((*path, index))
                index += 1
            else:
                self._pair(path)
            self._skip(_TRIVIA)
            if self._text[self._pos] == ",":
                self._pos += 1
                self._skip(_TRIVIA)
        self._pos += 1

    def _dotted_key(self) -> list[str]:
        parts = []
        while True:
            self._skip(_BLANK)
            raw = self._skip(_KEY)
            parts.append(tomllib.loads(f"k = {raw}")["k"] if raw[0] in "\"'" else raw)
            self._skip(_BLANK)
            if self._text[self._pos] != ".":
                return parts
            self._pos += 1

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._pos)
        if match is None:
            raise ValueError(f"no TOML token at line {self._line(self._pos)}")
        self._pos = match.end()
        return match.group()

    def _note(self, path: Path, pos: int) -> None:
        """Remember where `path` is first named; a later header of the table itself wins."""
        self.lines.setdefault(path, self._line(pos))

    def _line(self, pos: int) -> int:
        return bisect_right(self._starts, pos)
