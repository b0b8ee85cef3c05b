"""One torch thread for each test process: two threads on a busy machine are many times slower.

And Ctrl-C is heard, also where the tests were started in the background by a shell that has it ignored.
"""

import importlib.util
import signal
import threading

import torch

pytest_plugins = ["browsing"]
collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["unit/flower/*"]  # an extra, part of `test`

torch.set_num_threads(1)
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
