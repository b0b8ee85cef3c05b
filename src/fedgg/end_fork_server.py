"""Preloaded by a fork server before other modules, so that it ends with its parent, even while it imports torch.

A fork server must not have threads, so only the kernel can end it, on Linux.
"""

from __future__ import annotations

import os

from fedgg.child_process import STARTED_BY, end_with

end_with(int(os.environ.get(STARTED_BY, os.getppid())))
