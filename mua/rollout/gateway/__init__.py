"""An OpenAI-compatible endpoint in front of the engines that keeps every session's tokens (docs/gateway.md)."""
