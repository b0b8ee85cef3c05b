"""What a process needs of the machine before it is started."""

from __future__ import annotations

import os
import resource

import pytest

from fedgg.engines.workers.pool import OPEN_FILES, allow_open_files
from fedgg.errors import UserError


def in_a_process(soft: int, hard: int) -> int:
    """Its exit code: 0 where another process could be started, 2 where one line says why not."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        in_use = len(list(OPEN_FILES.iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + soft, in_use + hard))
        try:
            allow_open_files(12)
        except UserError as error:
            os._exit(2 if "ulimit -n" in str(error) and "\n" not in str(error) else 3)
        pipes = [os.pipe() for _ in range(5)]
        os._exit(0 if pipes else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="this system does not say which files are open")
@pytest.mark.parametrize(("soft", "hard", "code"), [(100, 100, 0), (5, 100, 0), (5, 5, 2)])
def test_the_limit_is_raised_or_one_line_says_so(soft: int, hard: int, code: int) -> None:
    assert in_a_process(soft, hard) == code
