"""Whether somebody agrees: "Yes, please." does, "Yes, but wait" and "Not yet" do not."""

from __future__ import annotations

import re

from mua.language.text import sentences

_YES = re.compile(
    r"\b(?:yes|yeah|yep|yup|sure|okay|correct|right|absolutely|definitely|certainly|of course|please do|please proceed|go ahead"
    r"|do (?:it|that)|proceed|sounds (?:good|great|fine|right)|that is (?:right|fine|correct|good|okay)|(?:i )?(?:agree|confirm|accept|approve)"
    r"|(?:i am )?(?:fine|happy|okay) with (?:that|it)|by all means|perfect|exactly|fine|great|affirmative|indeed|works for me|make it so)\b"
)
_BUT = re.compile(
    r"\b(?:no|nope|not|never|wait|stop|hold on|instead|rather|but|actually|changed my mind|hang on|do not|unless|before that|cancel that)\b"
)
_BACK = re.compile(
    r"^(?:oh |hm |hmm |uh |sorry ,? ?|and |well ,? ?)*(?:no|nope|not|never|wait|stop|hold on|hang on|but|actually|do not|unless|before|first|only)\b"
    r"|\b(?:instead|changed my mind|cancel that|forget (?:it|that)|never ?mind|not (?:sure|yet|now)|rather not|do not (?:do|change|add|want))\b"
)
"""How a sentence beside the yes takes it back; people also speak of other things, with a "not" in it."""
_FINE = re.compile(r"\b(?:no (?:problem|worries|objections?|need|thanks|hurry|rush)|do not worry|why not|if not|not at all)\b")


def agrees(text: str) -> bool:
    """Whether ``text`` says yes and takes nothing of it back."""
    said = [_FINE.sub(" ", sentence.text).strip() for sentence in sentences(text)]
    yes = [one for one in said if _YES.search(one)]
    return bool(yes) and not any(map(_BUT.search, yes)) and not any(_BACK.search(one) for one in said if one not in yes)
