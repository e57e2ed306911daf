"""What to install where a package is missing that only some of the project needs: the extras of ``setup.py``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

_STACK = (
    'for a CPU: pip install "mua[cpu]" -c "$(mua files constraints/cpu-py312.txt)", then pip install --no-deps -r '
    '"$(mua files constraints/cpu-py312-nodeps.txt)"; for CUDA: pip install -r "$(mua files '
    'constraints/gpu-py312-cu.txt)"'
)
_TOOLS = "pip install 'mua[tools]'"
TOOL_SERVERS, PAGES = ("mcp",), ("lxml", "pypdf", "trafilatura")
"""Modules without which no tool server and no parser of pages starts."""
EXTRAS = {
    **dict.fromkeys(("torch", "megatron", "sglang", "triton"), _STACK),
    **dict.fromkeys((*TOOL_SERVERS, "mcp_types", "httpx2", "anyio"), _TOOLS),
    **dict.fromkeys((*PAGES, "charset_normalizer", "lxml_html_clean"), _TOOLS),
    **dict.fromkeys(("math_verify", "sympy", "latex2sympy2_extended"), _TOOLS),
    "psycopg": "pip install 'mua[postgres]'",
    "pyarrow": "pip install 'mua[parquet]'",
}
"""By the module that an import asks for."""


def advice(error: BaseException) -> str | None:
    """One line for a person; None unless ``error`` says that a module of an extra is not installed."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    return _told(module) if module in EXTRAS else None


def lacking(modules: Iterable[str]) -> str | None:
    """The advice on the first of ``modules``, which belong to extras, that is not installed; imports none of them."""
    missing = next((module for module in modules if find_spec(module) is None), None)
    return None if missing is None else _told(missing)


def _told(module: str) -> str:
    return f"{module} is not installed; {EXTRAS[module]}"
