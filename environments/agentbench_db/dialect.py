"""What MySQL reads in a statement, as SQLite reads it: texts, comments, and names that begin with a digit.

========================  =============================  ===============================
MySQL                     means                          written for SQLite
========================  =============================  ===============================
``'it\\'s'``, ``"it's"``  a text, with backslash escapes  ``'it''s'``
```a b```                 a name                         ``"a b"``
``# to the line's end``   a comment                      nothing
``1952_British``          a name                         ``"1952_British"``
``LEFT(a, 1)``            a function                     ``"LEFT"(a, 1)``
========================  =============================  ===============================
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
      (?P<text>'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*")
    | (?P<name>`(?:[^`]|``)*`)
    | (?P<open>['"`].* | /\*(?!.*?\*/).*)
    | (?P<comment>/\*.*?\*/ | \#[^\n]* | --(?=\s|$)[^\n]*)
    | (?P<number>0[xX][0-9a-fA-F]+\b | \d+[eE][+-]?\d+\b)
    | (?P<digits>(?<![\w.$])\d+[A-Za-z_$][\w$]*)
    | (?P<side>\b(?:left|right)(?=\s*\())
    | (?P<word>[\w$]+)
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
"""``open``: what is begun and never ended, whole, so that the pattern is tried once there; SQLite refuses it."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "0": "\0", "Z": "\x1a", "%": "\\%", "_": "\\_"}


def for_sqlite(sql: str) -> str:
    """The statement with MySQL's texts, names and comments in SQLite's form; whatever else it holds is left."""
    return _TOKEN.sub(_written, sql)


def _written(match: re.Match[str]) -> str:
    whole = match[0]
    if match["text"] is not None:
        inner = whole[1:-1].replace(whole[0] * 2, whole[0])
        plain = _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[1]), inner)
        return "'" + plain.replace("'", "''") + "'"
    if match["name"] is not None:
        return '"' + whole[1:-1].replace("``", "`").replace('"', '""') + '"'
    if match["comment"] is not None:
        return " "
    return f'"{whole}"' if match["digits"] or match["side"] else whole
