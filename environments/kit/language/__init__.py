"""Plain English, read by rules and by what was learnt: what an agent does with a message, whether what it states is so.

``text`` puts a message into sentences, ``patterns`` turns phrases kept as data into expressions, ``acts`` reads what a
message does (asks, proposes, has done, refuses, ...) by what ``model`` and ``network`` have learnt, ``claims`` holds
what it states against the facts of the moment. Domains bring their words as YAML; nothing here knows a domain.
"""
