"""Tokens of a conversation: the append-only stream, chat families, the tool-call parser.

Importing this package loads neither transformers nor tokenizers.
"""

from mua.tokens.chat_family import ChatFamily
from mua.tokens.codec import ConversationError
from mua.tokens.conversation import Conversation
from mua.tokens.family_loading import load_family
from mua.tokens.parsing import AssistantTurn, ErrorKind, ToolCall, ToolCallError

__all__ = [
    "AssistantTurn",
    "ChatFamily",
    "Conversation",
    "ConversationError",
    "ErrorKind",
    "ToolCall",
    "ToolCallError",
    "load_family",
]
