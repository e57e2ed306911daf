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
_FINE = re.compile(r"\b(?:no (?:problem|worries|objections?|need|thanks)|do not worry|why not|if not|not at all)\b")


def agrees(text: str) -> bool:
    """Whether ``text`` says yes and takes nothing of it back."""
    said = " . ".join(sentence.text for sentence in sentences(text))
    plain = _FINE.sub(" ", said)
    return _YES.search(plain) is not None and _BUT.search(plain) is None
