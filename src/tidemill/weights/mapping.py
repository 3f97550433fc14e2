"""A file as memory: one private, copy-on-write map.

Tensors made over it need no read and no copy, and writing to one never reaches the file. Knows nothing of formats.
"""

from __future__ import annotations

import mmap
import platform
import sys
from pathlib import Path

from tidemill.errors import BadCheckpoint

# Without it, Linux counts the whole file as memory that might be written, and refuses maps larger than RAM. Python
# names the flag from 3.13 on; its number is the same on the machines listed.
_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if _KNOWN else 0)


def map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as handle:
            return mmap.mmap(
                handle.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} does not exist", cause=str(error), fix="check the path") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path} is empty", cause=str(error), fix=f"delete {path} and download it again") from error
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read", cause=str(error), fix="check its permissions") from error
