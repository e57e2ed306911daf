"""Tokens of a conversation: the append-only stream, chat families, the tool-call parser.

Importing this package loads neither transformers nor tokenizers.
"""

from mua.tokens.codec import ConversationError
from mua.tokens.conversation import Conversation
from mua.tokens.family import ChatFamily, load_family
from mua.tokens.parsing import AssistantTurn, ErrorKind, ToolCall, ToolCallError
from mua.tokens.small import train_tokenizer

__all__ = [
    "AssistantTurn",
    "ChatFamily",
    "Conversation",
    "ConversationError",
    "ErrorKind",
    "ToolCall",
    "ToolCallError",
    "load_family",
    "train_tokenizer",
]
