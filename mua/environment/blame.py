"""Whose fault it is that something did not work: the one table for endpoints, tool servers, search and sandbox.

Error codes decide first, words second. What neither knows is the default of its place.

=============== ===================================================================================================
``policy``      what the policy wrote or asked for: a result that it reads, or an outcome that is scored
``context``     the policy's too: its conversation no longer fits
``control``     undecided: a request that no policy wrote is sent to the same server. Where that is answered, the
                policy's request was to blame, else the infrastructure
``forgotten``   the server knows the session no more and has done nothing: asked again in another session
``passing``     the infrastructure's: asked again, the episode is repeated, never scored
``person``      the configuration's: ends the run as long as nothing has ever worked there, later as ``passing``
=============== ===================================================================================================

The rule behind the rows: *no action of a policy can make its own episode unscored*. So whatever a policy could bring
about is never ``passing`` here, unless the server itself says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal, TypeAlias

Place: TypeAlias = Literal["endpoint", "tool_server", "search", "sandbox"]
Code: TypeAlias = int | str
"""An HTTP status, a code of JSON-RPC, or what a server calls its error, in lower case."""


class Blame(StrEnum):
    """See the table above."""

    POLICY = "policy"
    CONTEXT = "context"
    CONTROL = "control"
    FORGOTTEN = "forgotten"
    PASSING = "passing"
    PERSON = "person"


_OVERLOADED: Mapping[Code, Blame] = dict.fromkeys((408, 409, 425, 429), Blame.PASSING)

CODES: Mapping[Place, Mapping[Code, Blame]] = {
    "endpoint": {
        **dict.fromkeys(
            (
                "context_length_exceeded",
                "string_above_max_length",
                "exceed_context_size_error",
                "prompt_too_long",
                "context_window_exceeded",
                "contextwindowexceedederror",
                "model_max_prompt_tokens_exceeded",
                "input_too_long",
                "input_length_error",
                "1261",
            ),
            Blame.CONTEXT,
        ),
        **dict.fromkeys(
            (
                "content_filter",
                "content_policy_violation",
                "contentpolicyviolationerror",
                "moderation_blocked",
                "responsibleaipolicyviolation",
                "data_inspection_failed",
                "datainspectionfailed",
                "invalid_prompt",
                "1301",
                "censorship_blocked",
            ),
            Blame.POLICY,
        ),
        **dict.fromkeys(("rate_limit_exceeded", "insufficient_quota", "overloaded_error"), Blame.PASSING),
        **dict.fromkeys(("invalid_api_key", "model_not_found"), Blame.PERSON),
        **_OVERLOADED,
        413: Blame.CONTEXT,
        **dict.fromkeys((401, 403, 404), Blame.PERSON),
    },
    "tool_server": {
        **dict.fromkeys((404, "forgotten"), Blame.FORGOTTEN),  # as MCP has it, where there was a session
        **dict.fromkeys((413, 414, 422, 431, 451), Blame.POLICY),
        **dict.fromkeys((-32600, -32601, -32602, -32603), Blame.POLICY),  # an answer: the policy reads it
        "hung": Blame.CONTROL,
        "garbage": Blame.CONTROL,
        "crashed": Blame.CONTROL,
        "flooded": Blame.CONTROL,
        "refused": Blame.PASSING,
        "tools_changed": Blame.CONTROL,
        "told": Blame.PASSING,
    },
    "search": {
        **dict.fromkeys((400, 413, 414, 422, 431, 451), Blame.POLICY),
        401: Blame.PERSON,
    },
    "sandbox": {
        **dict.fromkeys(("exit_status", "limit", "lost"), Blame.POLICY),  # how a program ends, and its sandbox with it
        "ended": Blame.CONTROL,  # between two calls: another one starts, or does not
        "not_started": Blame.PASSING,
    },
}

_CONTEXT = re.compile(
    r"context[ _-]?(length|window|size|limit|overflow)"
    r"|\bmax(imum)?[ _-]?(model|prompt|input|sequence|seq|allowed)[ _-]?(len|length|tokens|characters)\b"
    r"|(prompt|inputs?(_ids)?|conversation|messages?)\b[^.]{0,60}?\b(too (long|large)|(longer|larger) than|exceed)"
    r"|\brequest( body| entity)?( is| was)? too (long|large)|prompt has \d+ tokens|prompt length\b|maxLength: \d"
    r"|(?<!completion )(?<!output )\btokens?\b[^.]{0,60}?\b(exceed|more than the (allowed|max)|only supports)"
    r"|too many (input |prompt )?tokens|reduce the length of (the|your) (messages|prompt|input)"
    r"|tokens`? \+ `?max_(new_)?tokens|must have less than \d+ tokens|range of input length|token limit"
    r"|max_(new_)?tokens must be (at least [01]|greater than 0), got -?\d|session_len"
    r"|输入(内容)?(长度|过长)|超(长|过上限)",
    re.IGNORECASE,
)
_PER_TIME = re.compile(
    r"\b(rate limit|quota|too many requests)|tokens? per (minute|day|min)\b|\b[TR]P[MD]\b"
    r"|\btimed? ?(out|limit)|took too long|deadline|\bconcurren|\bqueue|\bcredits?\b|\bbudget\b|out of memory",
    re.IGNORECASE,
)
_FILTERED = re.compile(
    r"content[ _-]?(filter|management|policy|exists risk)|\bsafety\b|flagged|inappropriate content|guardrail"
    r"|sensitive ?(content|information)|new_sensitive|敏感|prohibited_content|recitation|blocklist|\bspii\b|'refusal'"
    r"|(malformed|unexpected)_(function|tool)_call|too_many_tool_calls",
    re.IGNORECASE,
)

WORDS: Mapping[Place, tuple[tuple[re.Pattern[str], Blame], ...]] = {
    "endpoint": (
        (_PER_TIME, Blame.PASSING),
        (_CONTEXT, Blame.CONTEXT),
        (_FILTERED, Blame.POLICY),
    ),
    "tool_server": ((re.compile(r"\bsession\b", re.I), Blame.FORGOTTEN),),
    "search": (
        (re.compile(r"\b(no|any|0|zero) (results?|matches|hits)\b|nothing (was )?found|not found", re.I), Blame.POLICY),
    ),
    "sandbox": (),
}  # fmt: skip

DEFAULTS: Mapping[Place, Blame] = {
    "endpoint": Blame.PASSING,
    "tool_server": Blame.CONTROL,
    "search": Blame.CONTROL,
    "sandbox": Blame.POLICY,
}
_LONGEST = 4000
"""Characters of an error that are searched for words."""


def blame(place: Place, codes: Sequence[Code | None] = (), words: str = "") -> Blame:
    """Who answers for a fault with these ``codes``, the most telling first, and these ``words``."""
    table = CODES[place]
    for code in codes:
        if (found := table.get(code.lower() if isinstance(code, str) else code or 0)) is not None:
            return found
    said = f"{words[:_LONGEST]} {' '.join(str(code)[:100] for code in codes)}"
    for pattern, found in WORDS[place]:
        if pattern.search(said):
            return found
    return DEFAULTS[place]


def error_codes(error: object) -> list[Code]:
    """The codes that the error of an HTTP body names, the most telling first: its ``code``, its ``type``."""
    if not isinstance(error, dict):
        return []
    inner = error.get("innererror") or error.get("metadata")
    named = [inner.get("code"), "content_filter" if "flagged_input" in inner else ""] if isinstance(inner, dict) else []
    named += [error.get(key) for key in ("code", "type", "error_type")]
    return [code for code in named if code and isinstance(code, str | int) and not isinstance(code, bool)]
