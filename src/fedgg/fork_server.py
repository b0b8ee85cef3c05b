"""Imported by a fork server before anything else: it ends with the process that started it, while it imports torch too.

A fork server must not have threads, so this is left to the kernel, where it can do it.
"""

from __future__ import annotations

import os

from fedgg.child_process import STARTED_BY, end_with

end_with(int(os.environ.get(STARTED_BY, os.getppid())))
