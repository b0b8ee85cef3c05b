"""The one exception that is the user's business.

Everything that a user can put right (a wrong key, a missing file, a full disk) is raised as `UserError` with one line
that names the offending thing and the way out. The command line prints that line and exits with code 2; any other
exception is a bug of ours and keeps its traceback.
"""


class UserError(Exception):
    """A mistake the user can put right; its message is one line."""
