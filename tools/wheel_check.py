"""Build the wheel, install it away from the repository, and do there what a new user does.

    python -m tools.wheel_check [--train] [--fresh] [--keep FOLDER]

The wheel is built of the files that git knows, and installed without dependencies into a virtual environment that sees
the packages of this one but not the repository; with ``--fresh`` into an empty one, by the commands of
docs/installation.md. Commands then run in an empty folder, each printed with its time: help, recipes, a job script, a
domain of one's own that an entry point registers. With ``--train`` that domain is trained on, from its conversations to
the page that shows the run, and it must have learned; a table of all commands comes last.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from mua.utils.source_state import FOLDERS
from tools import kit

PACKAGES = ("mua", "megatron_bridge", "environments", "workbench")
SECONDS = 3600.0
"""Of one command, on a machine that is slow and busy."""
OWN_CONFIG = """\
extends: demo
name: shop
output: runs/shop
model: {path: runs/shop-sft/hf}
environment: {name: shop}
user: {personas: []}
algorithm: {groups_per_step: 12, curriculum: {kind: "off", floor: 0.1, decay: 0.5}}
trainer: {steps: 10, save_every: 5, evaluate_first: true, evaluate_every: 5}
evaluation: {tasks: null}
"""
COLD_START = ("sft.data=shop.jsonl", "output=runs/shop-sft", "trainer.steps=24", "sft.batch_size=4")
"""Short: what it leaves undone is for rewards to teach."""


@dataclass(frozen=True)
class Installed:
    """An installed wheel, and an empty folder to work in."""

    venv: Path
    folder: Path
    times: list[tuple[str, float]] = field(default_factory=list)
    """Of every command that was run, seconds."""
    bare: bool = False
    """Whether its packages came from an index of their own, by its own pip."""

    def environment(self) -> dict[str, str]:
        """Of a shell that has the virtual environment active and knows of no repository."""
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MUA_ROOT")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        return kept | {"PATH": f"{self.venv / 'bin'}:{kept['PATH']}", "VIRTUAL_ENV": str(self.venv)}

    def run(self, *command: str, status: int = 0) -> str:
        """What a command prints on standard output; raises :class:`RuntimeError` with all it said if it leaves with
        another ``status``."""
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SECONDS,
        )  # fmt: skip
        if done.returncode != status:
            said = (done.stdout + done.stderr)[-6000:]
            raise RuntimeError(f"$ {shlex.join(command)}\n{said}\nstatus {done.returncode}")
        seconds, shown = time.monotonic() - began, shlex.join(command).replace(str(self.venv.parent), "~")
        self.times.append((shown, seconds))
        print(f"{seconds:6.1f} s  {shown}", flush=True)
        return done.stdout


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--train", action="store_true", help="also train on the new domain")
    parser.add_argument("--fresh", action="store_true", help="install everything from the package index")
    parser.add_argument("--keep", type=Path, help="folder to work in and leave; by default one that is removed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.keep or Path(temporary)).resolve()
        wheel = build(work)
        installed = fresh(wheel, work) if arguments.fresh else install(wheel, work)
        new_user(installed)
        if arguments.train:
            train(installed)
        rows = [(f"`{command}`", f"{seconds:.1f}") for command, seconds in installed.times]
        print(f"\n{kit.table(('command', 'seconds'), [*rows, ('all', f'{sum(s for _, s in installed.times):.0f}')])}")


def build(work: Path) -> Path:
    """The wheel, from a copy of the repository's files."""
    copy = work / "source"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=kit.ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    wanted = (*PACKAGES, *FOLDERS, "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md")
    for name in names:
        if name.startswith(wanted) and (kit.ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kit.ROOT / name, copy / name)
    made = [sys.executable, "-m", "uv", "build", "-q", "--wheel", "--no-build-isolation", "--offline", "-o", str(work)]
    subprocess.run([*made, "."], cwd=copy, check=True, timeout=SECONDS)
    (wheel,) = work.glob("mua-*.whl")
    lacking = missing(wheel, copy)
    if lacking:
        raise RuntimeError(f"{wheel.name} lacks {len(lacking)} files of the repository: {', '.join(lacking[:10])}")
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
    return wheel


def missing(wheel: Path, source: Path) -> list[str]:
    """Files of packages and shipped folders in ``source`` that the wheel has not."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    places = {folder: folder for folder in PACKAGES} | {folder: f"mua/_shipped/{folder}" for folder in FOLDERS}
    found = (
        f"{place}/{path.relative_to(source / folder).as_posix()}"
        for folder, place in places.items()
        for path in sorted((source / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    )
    return [name for name in found if name not in held]


def install(wheel: Path, work: Path) -> Installed:
    """Into a new virtual environment whose third-party packages are this one's."""
    venv, folder = work / "venv", work / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=SECONDS)
    folder.mkdir()
    packages = next(venv.glob("lib/python*/site-packages"))
    # A line of a .pth file is a path; the .pth files in there, one of which names the repository, are not read.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    installed = Installed(venv, folder)
    subprocess.run([*uv_install(venv), str(wheel)], check=True, timeout=SECONDS)
    return installed


def fresh(wheel: Path, work: Path) -> Installed:
    """Into a new virtual environment, with every requirement from the package index."""
    installed = Installed(work / "venv", work / "empty", bare=True)
    installed.folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(installed.venv)], check=True, timeout=SECONDS)
    installed.run("pip", "install", "-q", str(wheel))
    pins, bare = (installed.run("mua", "files", f"constraints/cpu-py312{part}.txt").strip() for part in ("", "-nodeps"))
    installed.run("pip", "install", "-q", "mua[cpu]", "-c", pins)
    installed.run("pip", "install", "-q", "--no-deps", "-r", bare)
    return installed


def uv_install(venv: Path) -> list[str]:
    """An installer's command for ``venv``, without requirements and without an index."""
    return [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--offline", "--python", str(venv)]


def new_user(installed: Installed) -> None:
    """The commands of a first hour, none of which loads a model."""
    home = installed.run("python", "-c", "import mua, environments; print(mua.__file__, environments.__file__)")
    if str(kit.ROOT) in home or home.count(str(installed.venv)) != 2:
        raise RuntimeError(f"the installed package is not the wheel's: {home}")
    expect("Train a policy", installed.run("mua", "--help"))
    expect("qwen3-8b-1x8", installed.run("mua", "recipes"))
    expect("hf_config", installed.run("mua", "config", "show", "qwen3-8b-1x8", "trainer.steps=3"))
    user = "slurm.user_address=address"
    job = ("mua", "launch", "slurm", "qwen3-8b-1x8", user, "slurm.gpus_per_node=8", "--dry-run")
    script = installed.run(*job, status=2)  # it is printed, and that the model is not there is said beside it
    expect(f"MUA_ROOT={installed.run('mua', 'files', '.').strip()}", script)
    expect("sglang==", Path(installed.run("mua", "files", "constraints/cpu-py312-nodeps.txt").strip()).read_text())
    own_domain(installed)
    if stray := [path.name for path in installed.folder.iterdir() if path.name not in ("shop", "address")]:
        raise RuntimeError(f"left in the empty folder: {', '.join(stray)}")


def own_domain(installed: Installed) -> None:
    """A domain in a project of its own, registered by its entry point."""
    project = installed.folder / "shop"
    project.mkdir()
    installed.run("mua", "env", "new", "shop", "--into", "shop")
    editable = ("pip", "install", "-q") if installed.bare else (*uv_install(installed.venv), "--no-build-isolation")
    installed.run(*editable, "-e", "./shop")
    expect("seats of a theatre", installed.run("mua", "env", "play", "shop"))


def train(installed: Installed) -> None:
    """A plan; the new domain from its conversations to a policy that has learned it."""
    expect("training", installed.run("mua", "plan", "qwen3-8b-1x8"))
    (installed.folder / "shop.yaml").write_text(OWN_CONFIG, encoding="utf-8")
    base = installed.run("mua", "files", "tools/base").strip()
    installed.run("mua", "conversations", "shop.yaml", "shop.jsonl", "--count", "40", f"model.path={base}")
    installed.run("mua", "sft", "demo-sft", f"model.path={base}", *COLD_START)
    installed.run("mua", "train", "shop.yaml", "--check")
    installed.run("mua", "train", "shop.yaml")
    installed.run("mua", "view", "runs/shop", "--export", "shop.html")
    points = (installed.folder / "runs/shop/evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    before, *_, after = (json.loads(line)["eval/validation_success"] for line in points)
    print(f"success on the validation split: {before:.3f} before rewards, {after:.3f} after them")
    if after <= before:
        raise RuntimeError("nothing was learned")
    if not (installed.folder / "runs/shop/hf/model.safetensors").exists():
        raise RuntimeError("runs/shop/hf: nothing was exported")


def expect(text: str, said: str) -> None:
    """Raises :class:`RuntimeError` where ``text`` is not in what a command said."""
    if text not in said:
        raise RuntimeError(f"expected {text!r} in:\n{said[:4000]}")


if __name__ == "__main__":
    main()
