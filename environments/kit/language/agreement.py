"""Whether somebody agrees: "Yes, please." does, "Yes, but wait" and "Not yet" do not."""

from __future__ import annotations

import re

from environments.kit.language.text import sentences

_YES = re.compile(
    r"\b(?:yes|yeah|yep|yup|sure|okay|correct"
    r"|right(?! (?:after|before|at|now|away|here|there|in|on)\b)|absolutely|definitely|certainly|of course"
    r"|please do|please proceed"
    r"|go ahead|go on|carry on|do (?:it|that)|proceed|(?:sounds|looks) (?:good|great|fine|right)|that works"
    r"|that is (?:right|fine|correct|good|okay|what i want)|(?:i )?(?:agree|confirm|accept|approve)"
    r"|(?:i am )?(?:fine|happy|okay) with (?:that|it)|by all means|perfect|exactly|fine|great|affirmative|indeed"
    r"|works for me|make it so)\b"
)
_BUT = re.compile(
    r"\b(?:no|nope|not|never|wait|stop|hold on|instead|rather than|but|hang on|unless|before (?:that|you)|correction)\b"
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|stop|hold on|hang on|slow down|changed my mind|cancel that|scratch that|not yet|not so fast"
    r"|do not (?:do|go|proceed)"
    r"|(?:that|it|this) (?:is|was) (?:wrong|not right)|i (?:am not sure|hesitate)|one more thing first)\b"
    r"|^(?:oh |well |sorry |,|\s)*(?:no|nope)\b"
)
_FINE = re.compile(
    r"\b(?:no (?:problem|worries|objections?|need|thanks|hurry|rush)|do not worry|why not|if not|not at all|actually)\b"
)


def agrees(text: str) -> bool:
    """Whether a sentence of ``text`` says yes and takes nothing of it back, and no other one does."""
    said = [_FINE.sub(" ", sentence.text) for sentence in sentences(text)]
    if any(_TAKEN_BACK.search(sentence) for sentence in said):
        return False
    return any(_YES.search(sentence) and not _BUT.search(sentence) for sentence in said)
