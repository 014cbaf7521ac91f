"""`python -m gradsync_fx.diagnose script.py`: runs a script and watches its training, under a launcher of ranks too.

As `__main__` it is the command `gradsync-fx diagnose`. Imported it is the function `gradsync_fx.diagnose`, so that the
name means one thing: an import of a submodule would otherwise put the module where the package has the function.
"""

import sys


if __name__ == "__main__":
    from gradsync_fx.cli.main import diagnose_script

    diagnose_script()
else:
    from gradsync_fx import eager_loops

    sys.modules[__name__] = eager_loops.diagnose  # type: ignore[assignment]
