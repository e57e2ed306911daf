"""Packaging. The ranges here say what is needed; the versions that were run together are in ``constraints/``."""

import re
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("configs", "slurm", "constraints", "tools/base")
"""The wheel has these folders in ``mua/_shipped``, see ``mua/utils/source_state.py``."""
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "mua/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
assert VERSION is not None

CORE = [
    "aiohttp>=3.10",
    "alembic>=1.14",
    "bm25s>=0.3",
    "httpcore>=1.0",
    "httpx>=0.28",
    "huggingface-hub>=1.0",
    "jinja2>=3.1",
    "jsonschema-rs>=0.40",
    "matplotlib>=3.10",
    "numpy>=2.0",
    "openai>=2.0",
    "orjson>=3.10",
    "packaging>=24.0",
    "psutil>=6.0",
    "pybase64>=1.4",
    "pydantic>=2.11",
    "python-dateutil>=2.9",
    "pyyaml>=6.0",
    "rapidfuzz>=3.9",
    "rich>=14.0",
    "safetensors>=0.5",
    "scipy>=1.14",
    "sqlalchemy>=2.0",
    "tenacity>=9.0",
    "tensorboard>=2.18",
    "threadpoolctl>=3.5",
    "tokenizers>=0.21",
    "transformers>=5.0",
    "typer>=0.16",
    "xxhash>=3.5",
    "zstandard>=0.23",
]

# Tool servers, the page reader, and what scores answers.
TOOLS = [
    "charset-normalizer>=3.3",
    "lxml>=5.3",
    "lxml-html-clean>=0.4",
    "math-verify[antlr4_13_2]>=0.7",
    "mcp>=2.0",
    "pypdf>=6.4",
    "trafilatura>=2.0",
]

# What SGLang imports when it serves on a CPU. SGLang itself is installed without its CUDA dependencies, see
# constraints/cpu-py312-nodeps.txt.
CPU = [
    "apache-tvm-ffi",
    "compressed-tensors",
    "dill",
    "einops",
    "fastapi",
    "gguf",
    "huggingface_hub",
    "ipython",
    "jsonschema",
    "megatron-core==0.19.2",
    "msgspec",
    "partial-json-parser",
    "pillow",
    "prometheus-client",
    "python-multipart",
    "pyzmq",
    "requests",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    "starlette",
    "torch==2.14.1",
    "torchvision==0.29.2",
    "triton==3.8.0",
    "uvicorn",
    "uvloop",
]

GPU = [
    "megatron-core>=0.19.2,<0.20",
    "sglang==0.5.23",
    "transformer-engine>=2.9",
    "transformer-engine-cu13>=2.9",
]

DEV = [
    "hypothesis>=6.100",
    "mcp-server-git",
    "mcp-server-time",
    "mypy>=1.15",
    "playwright>=1.50",
    "pytest>=8.3",
    "pytest-asyncio>=1.0",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "ruff>=0.11",
    "types-PyYAML",
    "uv>=0.7",
]

# The site of docs/, built by `make site`.
DOCS = [
    "mkdocs>=1.6",
    "mkdocs-material>=9.5",
]


class BuildWithFiles(build_py):
    """What setuptools builds, and the folders of a checkout that are no packages."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # which runs from the checkout
            for folder in SHIPPED:
                target = Path(self.build_lib, "mua/_shipped", folder)
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(ROOT / folder, target)


setup(
    name="mua",
    version=VERSION.group(1),
    description="Reinforcement learning of multi-turn agents that use tools and talk with users",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords="reinforcement learning, language models, agents, tool use, Megatron, SGLang",
    cmdclass={"build_py": BuildWithFiles},
    packages=find_namespace_packages(
        include=["mua", "mua.*", "megatron_bridge", "megatron_bridge.*", "environments", "environments.*", "workbench"],
        exclude=["*.__pycache__", "*.__pycache__.*"],
    ),
    # Namespace discovery takes every folder as a package, so templates, policies and task files travel with the code
    # that reads them. A folder with a dot in its name, as the .dist-info of the engine's CPU stand-in, needs naming.
    package_data={
        "": [
            "py.typed",
            "*.pyi",
            "*.jinja",
            "*.jinja2",
            "*.md",
            "*.txt",
            "*.json",
            "*.jsonl",
            "*.jsonl.gz",
            "*.json.gz",
            "*.npz",
            "*.yaml",
        ],
        "mua.view": ["static/*.js", "static/*.css", "static/vendor/*"],
        "mua.compat": ["**/*.dist-info/*"],
    },
    python_requires=">=3.12",
    install_requires=CORE,
    extras_require={
        "cpu": CPU,
        "gpu": GPU,
        "tools": TOOLS,
        "parquet": ["pyarrow>=15"],
        "postgres": ["psycopg[binary]>=3.2"],
        "dev": DEV,
        "docs": DOCS,
    },
    entry_points={"console_scripts": ["mua = mua.cli:main"]},
)
