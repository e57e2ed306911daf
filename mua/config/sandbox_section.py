"""The section ``environment.tools.sandbox``: where the programs that a policy writes run, and what they may use."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mua.config.section import NonNegative, Positive, PositiveFloat, Section


class SandboxConfig(Section):
    """What one rollout's sandbox may use. The system in it is read-only."""

    backend: Literal["bubblewrap", "docker", "apptainer"] = "bubblewrap"
    """What keeps programs in: namespaces of this machine's system, or a container of ``image``."""
    image: str = ""
    """Docker: an image that is on the machine; Apptainer: a SIF file or folder. It needs Python 3.9 or later as
    ``python3``, and ``sh``. Bubblewrap takes none: it shows the system of this machine."""
    network: bool = False
    """Whether programs reach the network; Docker alone can, because the others would share the network of this machine
    with the ports of its engines."""
    call_seconds: PositiveFloat = 20.0
    """Deadline of one call by the clock, in place of ``environment.call_seconds``; everything the call started is then
    killed."""
    cpu_seconds: Positive = 20
    """Processor time of each process."""
    memory_mib: Positive = 512
    """Memory of all processes together, looked at every 50 ms, and the limit of each process's address space."""
    processes: Positive = 64
    """Processes and threads at once."""
    disk_mib: Positive = 64
    """Size of the working folder and of /tmp, each; they live in memory."""
    files: Positive = 50_000
    """Files and folders that programs may have at once."""
    output_bytes: Annotated[int, Field(ge=64, le=400_000)] = 8000
    """Longest output of a call in bytes; its head and tail are kept, and the number of bytes cut is said."""
    ready: NonNegative = 4
    """Sandboxes started in advance. 0: each starts when its rollout first calls a tool."""
    start_seconds: PositiveFloat = 30.0
    """Deadline of starting one."""

    @model_validator(mode="after")
    def _fits_its_backend(self) -> Self:
        if self.backend == "bubblewrap" and self.image:
            raise ValueError("image belongs to the backends docker and apptainer; leave it out, or set backend")
        if self.backend != "bubblewrap" and not self.image:
            raise ValueError(f"backend {self.backend} needs image; it takes what is on the machine and pulls none")
        if self.image.startswith("-"):
            raise ValueError(f"image {self.image!r} is no name of an image")
        if self.network and self.backend != "docker":
            raise ValueError(
                f"network: with backend {self.backend} programs would share this machine's network, and so reach the "
                "ports of its engines; set it to false, or take backend docker"
            )
        return self
