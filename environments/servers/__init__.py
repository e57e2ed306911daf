"""Tool servers of this project, for any domain: the web and sandboxed programs. See docs/tool_servers.md."""
